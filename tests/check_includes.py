#!/usr/bin/env python3
"""Checks that every #include points down the stack of layers.

The tree is the architecture: a folder may include itself and what its row allows, nothing else. Some system
headers have one home, so that the library behind them can be replaced in one place. Prints one line per offence.
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# folder: what it may include besides itself (a folder, or one header). The longest matching folder counts.
LAYERS = {
    "prefill": ["common", "proto", "kernels"],
    "decode": ["common", "proto", "kernels"],
    "deploy/ctl": ["common", "proto", "kernels"],
    "router": ["common/text", "common/net", "proto", "kernels/kv_layout.h", "common/base"],
    "common/worker": ["common/model", "common/kv", "common/net", "common/text", "proto", "kernels", "common/base"],
    "common/model": ["common/kv", "common/text", "kernels", "common/base"],
    "common/kv": ["common/net", "proto", "kernels", "common/base"],
    "common/net": ["proto", "common/base"],
    "common/text": ["common/base"],
    "proto": ["common/base/err.h"],
    "kernels": ["common/base/err.h"],
    "common/base": [],
    "tests": ["prefill", "decode", "deploy/ctl", "router", "common", "proto", "kernels"],
}

# system header (a folder of headers ends in /): where it may be included
HOMES = {
    "cjson/": ["common/text"],
    "cJSON.h": ["common/text"],
    "pcre2.h": ["common/text"],
    "nng/": ["common/net"],
    "ucp/": ["common/net"],
    "uct/": ["common/net"],
    "ucs/": ["common/net"],
    "uv.h": ["common/net", "router", "tests/cluster"],  # the router is one libuv loop
    "systemd/": ["common/net"],
    "xxhash.h": ["common/base"],
    "cmocka.h": ["tests"],
}
CUDA = re.compile(r"^(cuda|cub/|cublas|cutlass/|cute/|mma\.h|nccl|nvtx)")
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
SOURCES = (".c", ".h", ".cu", ".cuh")


def within(path, place):
    return path == place or path.startswith(place + "/")


def layer_of(path):
    fits = [folder for folder in LAYERS if within(path, folder)]
    return max(fits, key=len) if fits else None


def check_quoted(path, layer, target, exists):
    if target.startswith((".", "/")) or not exists(target):
        return "is not a file of this tree, named from its root"
    if target.endswith((".c", ".cu")):
        return "includes a source file"
    if any(within(target, place) for place in [layer] + LAYERS[layer]):
        return None
    allowed = ", ".join([layer] + LAYERS[layer])
    return "points out of its layer; %s may include %s" % (layer, allowed)


def check_system(path, target):
    for header, homes in HOMES.items():
        fits = target.startswith(header) if header.endswith("/") else target == header
        if fits and not any(within(path, home) for home in homes):
            return "belongs to " + " and ".join(homes)
    if CUDA.match(target) and not path.endswith((".cu", ".cuh")):
        return "is a CUDA header; only .cu and .cuh files have them"
    return None


def check_file(path, text, exists):
    """Lines of complaint about one file."""
    layer = layer_of(path)
    if layer is None:
        return ["%s: lies in no layer" % path]
    out = []
    for number, line in enumerate(text.splitlines(), 1):
        m = INCLUDE.match(line)
        if not m:
            continue
        kind, target = m.groups()
        wrong = check_quoted(path, layer, target, exists) if kind == '"' else check_system(path, target)
        if wrong:
            out.append("%s:%d: %s %s" % (path, number, target, wrong))
    return out


def self_test():
    """The rules refuse what they are there to refuse."""
    cases = [
        ("common/kv/pool.c", '#include "common/model/shape.h"', True),
        ("common/kv/pool.c", '#include "common/net/link.h"', False),
        ("common/model/forward.c", '#include "common/net/link.h"', True),
        ("router/api.c", '#include "kernels/kv_layout.h"', False),
        ("router/api.c", '#include "kernels/ops.h"', True),
        ("router/api.c", '#include "common/kv/pool.h"', True),
        ("prefill/job.c", '#include "decode/seq.h"', True),
        ("proto/wire.c", '#include "common/base/buf.h"', True),
        ("kernels/dev.c", '#  include "common/base/err.h"', False),
        ("common/base/buf.c", '#include "proto/wire.h"', True),
        ("router/api.c", "#include <cjson/cJSON.h>", True),
        ("common/text/json.c", "#include <cjson/cJSON.h>", False),
        ("decode/server.c", "#include <ucp/api/ucp.h>", True),
        ("kernels/dev.c", "#include <cuda_runtime.h>", True),
        ("kernels/dev_cuda.cu", "#include <cuda_runtime.h>", False),
        ("tests/unit/a_test.c", '#include "common/kv/pool.c"', True),
        ("common/kv/pool.c", '#include "pool.h"', True),
    ]
    for path, line, refused in cases:
        got = check_file(path, line, lambda target: "/" in target)
        if bool(got) != refused:
            sys.exit("check_includes.py: its own rules fail on %s in %s: %s" % (line, path, got))


def main():
    self_test()
    wrong, n = [], 0
    for folder in sorted({f.split("/")[0] for f in LAYERS}):
        for at, _, names in os.walk(os.path.join(ROOT, folder)):
            for name in sorted(names):
                if not name.endswith(SOURCES):
                    continue
                full = os.path.join(at, name)
                path = os.path.relpath(full, ROOT).replace(os.sep, "/")
                with open(full, encoding="utf-8", errors="replace") as f:
                    wrong += check_file(path, f.read(), lambda t: os.path.isfile(os.path.join(ROOT, t)))
                n += 1
    for line in wrong:
        print(line)
    print("includes: %d files, %d wrong" % (n, len(wrong)))
    return 1 if wrong or not n else 0


if __name__ == "__main__":
    sys.exit(main())
