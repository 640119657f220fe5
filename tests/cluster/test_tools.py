#!/usr/bin/env python3
"""Programs that tests and measurements are made with name what is wrong with their settings, in one line.

usage: test_tools.py BUILD_DIR
"""
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import unittest

import harness

BUILD = os.path.abspath(sys.argv.pop(1) if len(sys.argv) > 1 else "build/release")
BENCH_STEP = os.path.join(BUILD, "bench", "gpu", "bench_step")


def run(*args, preexec_fn=None, **env):
    return subprocess.run(args, cwd=harness.ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, env=dict(os.environ, **env), preexec_fn=preexec_fn)


def make_checkpoint(*args, **more):
    return run(sys.executable, "tests/support/make_checkpoint.py", *args, **more)


def built(*parts):
    """A program of the build, or None with a line."""
    path = os.path.join(BUILD, *parts)
    if os.path.exists(path):
        return path
    print("no %s in this build: not tried" % os.path.join(*parts), flush=True)
    return None


class Tools(unittest.TestCase):
    def refused(self, r, *words):
        self.assertEqual(r.returncode, 2, r.stdout)
        self.assertNotIn("Traceback", r.stdout)
        for w in words:
            self.assertIn(w, r.stdout.splitlines()[-1])

    def test_make_checkpoint(self):
        with tempfile.TemporaryDirectory() as d:
            out = os.path.join(d, "model")
            for args, words in ((["--set", "hidden_size"], ("'hidden_size'", "FIELD=JSON")),
                                (["--set", "hidden_sise=256"], ("'hidden_sise=256'", "FIELD one of", "hidden_size")),
                                (["--set", "hidden_size=abc"], ("'hidden_size=abc'", "not JSON")),
                                (["--set", "hidden_size=256.0"], ("'hidden_size=256.0'", "a whole number")),
                                (["--set", 'hidden_size="256"'], ("a whole number",)),
                                (["--set", "hidden_size=-5"], ("a whole number, 1 to 65536",)),
                                (["--set", "hidden_size=0"], ("'hidden_size=0'", "1 to 65536")),
                                (["--set", "hidden_size=1.5"], ("a whole number, 1 to 65536",)),
                                (["--set", "hidden_size=100000000000"], ("a whole number, 1 to 65536",)),
                                (["--set", "hidden_size=255"], ("hidden_size is 255", "multiple of 32 for --form native")),
                                (["--form", "nvfp4", "--set", "moe_intermediate_size=40"], ("multiple of 16",)),
                                (["--form", "hf-base", "--set", "moe_intermediate_size=64"], ("multiple of 128",)),
                                (["--set", "o_groups=3"], ("o_groups is 3", "head_dim, 512")),
                                (["--set", "compress_ratios=[0,4,1,0]"], ("each 0 or 2 to 1024",)),
                                (["--seed", "abc"], ("--seed: 'abc'", "0 to 9223372036854775807")),
                                (["--preset", "flash", "--layers", "04"], ("--layers: '04'",)),
                                (["--preset", "flash", "--layers", "\u0664"], ("--layers:", "1 to 256")),
                                (["--set", "swiglu_limit=NaN"], ("'swiglu_limit=NaN'", "a number")),
                                (["--set", "attention_bias=0"], ("true or false",)),
                                (["--set", "compress_ratios=4"], ("'compress_ratios=4'", "a list")),
                                (["--set", "compress_ratios=[0,4]"], ("compress_ratios has 2", "num_hidden_layers, 3")),
                                (["--set", "num_experts_per_tok=9"], ("num_experts_per_tok is 9", "n_routed_experts, 8")),
                                (["--layers", "3"], ("--layers: of preset flash only",)),
                                (["--preset", "flash", "--layers", "0"], ("--layers: '0'", "1 to 256")),
                                (["--preset", "flash", "--layers", "-1"], ("--layers", "1")),
                                (["--shards", "0"], ("--shards: '0'", "1 to 999"))):
                self.refused(make_checkpoint(out, *args), *words)
                self.assertFalse(os.path.exists(out), args)
            r = make_checkpoint(out, "--set", "n_routed_experts=4096", "hidden_size=65536", "moe_intermediate_size=65536")
            self.assertEqual(r.returncode, 1, r.stdout)
            self.assertRegex(r.stdout, r"^make_checkpoint.py: OUT '.*': \d{6}\.\d+ GB are needed, \d+\.\d+ GB are free\n$")
            self.assertFalse(os.path.exists(out))
            # Nor are the folders on the way to it there, or on the way to one whose name is too long.
            r = make_checkpoint(os.path.join(out, "a", "b"), "--set", "n_routed_experts=4096", "hidden_size=65536",
                                "moe_intermediate_size=65536")
            self.assertEqual(r.returncode, 1, r.stdout)
            self.assertFalse(os.path.exists(out))
            self.refused(make_checkpoint(os.path.join(out, "a", "b" * 300)), "must be a folder")
            self.assertFalse(os.path.exists(out))
            for bad in ("/etc/passwd", "/proc/foo", ""):
                self.refused(make_checkpoint(bad), "OUT '%s': must be a folder" % bad)
            r = make_checkpoint(out, "--set", "index_topk=8", "rope_scaling=null", "swiglu_limit=7")
            self.assertEqual(r.returncode, 0, r.stdout)
            with open(os.path.join(out, "config.json")) as f:
                config = json.load(f)
            self.assertEqual([config[k] for k in ("index_topk", "rope_scaling", "swiglu_limit")], [8, None, 7])
            # Not beside the files of another one, but over its own; a disk that is full leaves nothing of it.
            self.refused(make_checkpoint(out, "--shards", "2"), "has model.safetensors of another checkpoint")
            self.assertEqual(sorted(os.listdir(out)), ["config.json", "model.safetensors"])
            self.assertEqual(make_checkpoint(out, "--seed", "2").returncode, 0)
            full = os.path.join(d, "full")
            r = make_checkpoint(full, "--shards", "3",
                                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)))
            self.assertEqual((r.returncode, r.stdout), (1, "make_checkpoint.py: OUT '%s': File too large\n" % full))
            self.assertEqual(os.listdir(full), [])
            self.assertEqual(make_checkpoint(full, "--shards", "3").returncode, 0)
            self.refused(make_checkpoint(full), "has model-00001-of-00003.safetensors of another checkpoint")
            # Blocks of fp8 are cut at the end of hidden_size.
            r = make_checkpoint(os.path.join(d, "cut"), "--form", "hf-base", "--set", "hidden_size=160")
            self.assertEqual(r.returncode, 0, r.stdout)

    def test_slack(self):
        """TOW_TEST_SLACK is read alike by tests in C and in Python."""
        test = built("test", "unit", "net_status_test")
        for reader in ([test] if test else None, [sys.executable, "tests/cluster/harness.py"]):
            if not reader:
                continue
            for slack in ("0.5", "0", "-1", "abc", "nan", "inf", "1001", "1e2", "0x10", " 4", "4 ", "4.5.6", ".", "1_0"):
                r = run(*reader, TOW_TEST_SLACK=slack)
                self.refused(r, 'TOW_TEST_SLACK "%s": must be a number, 1 to 1000' % slack)
            for slack in ("", "1", "2.5", "4."):
                r = run(*reader, TOW_TEST_SLACK=slack)
                self.assertEqual(r.returncode, 0, r.stdout)

    def test_device_of_tests(self):
        """A wrong name is no skip."""
        for kind, name in (("golden", "block_test"), ("kernels", "unit_golden_test"), ("gpu", "parity_test"),
                           *(("gpu", x + "_test") for x in ("attn", "gemm", "index", "launch", "memory", "moe", "norm",
                                                            "pages", "sample"))):
            test = built("test", kind, name)
            for device in ("cuda0", "cuda:01", "cuda:256") if test else ():
                self.refused(run(test, TOW_TEST_DEVICE=device), 'TOW_TEST_DEVICE "%s": must be' % device, "N from 0 to 255")
        test = built("test", "golden", "block_test")
        if test:
            self.refused(run(test, TOW_TEST_PRODUCTS="fp16"), 'TOW_TEST_PRODUCTS "fp16"', '"bf16" or "fp8"')

    def test_run(self):
        self.refused(run("sh", "tests/run.sh"), "BUILD_DIR ''")
        self.refused(run("sh", "tests/run.sh", "/nowhere", "unit"), "BUILD_DIR '/nowhere'")
        self.refused(run("sh", "tests/run.sh", BUILD, "units"), "KIND 'units'", "unit, kernels, golden")
        with tempfile.TemporaryDirectory() as d:
            r = run("sh", "tests/run.sh", d, "unit")
            self.assertEqual((r.returncode, r.stdout), (1, "0 passed, 0 failed\n"))
        test = built("test", "kernels", "parity_test")
        if test:
            self.refused(run(test, "no_such_op"), "no test is named 'no_such_op'", "--list")
            r = run(test, "--list")
            self.assertEqual(r.returncode, 0)
            self.assertIn("rmsnorm", r.stdout)

    def test_gpu_cluster(self):
        def cluster(build, device, second=""):
            r = run("sh", "tests/gpu/cluster.sh", build, TOW_TEST_DEVICE=device, TOW_TEST_DEVICE2=second)
            self.assertEqual(r.stdout.count("\n"), 1, r.stdout)
            return r

        self.refused(cluster("", "cuda:0"), "BUILD_DIR ''")
        self.refused(cluster("/nowhere", "cuda:0"), "BUILD_DIR '/nowhere'")
        for device in ("cuda0", "a/b", "cuda 0", "a&b", ".*"):
            self.refused(cluster(BUILD, device), "TOW_TEST_DEVICE '%s': must be" % device)
            self.refused(cluster(BUILD, "apart:cpu", device), "TOW_TEST_DEVICE2 '%s': must be" % device)
        # One that is named is wanted, whether the machine has others or none.
        r = cluster(BUILD, "apart:cpu", "cuda:255")
        self.assertIn(r.returncode, (2, 77), r.stdout)
        self.assertIn("TOW_TEST_DEVICE2 'cuda:255': must be" if r.returncode == 2 else "no CUDA", r.stdout)
        with tempfile.TemporaryDirectory() as d:  # a machine with one device, and no other programs
            os.mkdir(d + "/bin")
            with open(d + "/bin/towpath-ctl", "w") as f:
                f.write('#!/bin/sh\ncase $* in *cuda:1*) echo "device cuda:1: must be cuda:0 to cuda:0"; esac\nexit 2\n')
            os.chmod(d + "/bin/towpath-ctl", 0o755)
            self.refused(cluster(d, "cuda:0", "cuda:1"), "TOW_TEST_DEVICE2 'cuda:1': must be cuda:0 to cuda:0")
            r = run("sh", "tests/gpu/cluster.sh", d, TOW_TEST_DEVICE="cuda:0", TOW_TEST_DEVICE2="")
            self.assertEqual(r.returncode, 1, r.stdout)
            self.assertNotIn("TOW_TEST_DEVICE", r.stdout)

    def test_old_driver(self):
        """A driver that is too old is told, and is no skip; tests of the CPU pass beside it."""
        test, edge, cc = built("test", "gpu", "parity_test"), built("test", "kernels", "edge_test"), shutil.which("gcc")
        if not cc:
            print("no gcc here: an old driver not tried", flush=True)
        if not test or not edge or not cc:
            return
        with tempfile.TemporaryDirectory() as d:
            c = os.path.join(d, "driver.c")
            with open(c, "w") as f:
                f.write("int cuInit(unsigned f) { return (int)f; }\n"
                        "int cuDriverGetVersion(int *v) { *v = 9020; return 0; }\n")
            subprocess.run([cc, "-shared", "-fPIC", "-o", os.path.join(d, "libcuda.so.1"), c], check=True)
            r = run(test, "add", LD_LIBRARY_PATH=d)
            self.assertEqual(r.returncode, 1, r.stdout)
            for words in ("the driver is too old for CUDA", "it knows 9.2"):
                self.assertIn(words, r.stdout)
            r = run(edge, "*bad_values*", LD_LIBRARY_PATH=d)
            self.assertEqual(r.returncode, 0, r.stdout)

    def test_sanitize(self):
        """With a build and a compute-sanitizer that only say what they were given."""
        with tempfile.TemporaryDirectory() as d:
            def program(path, text):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w") as f:
                    f.write("#!/bin/sh\n" + text)
                os.chmod(path, 0o755)

            def sanitize(*args, **env):
                return run("sh", "tests/gpu/sanitize.sh", *args, CUDA_HOME=d, PATH=d + "/bin:" + os.environ["PATH"], **env)

            tests = os.path.join(d, "test", "gpu")
            program(tests + "/parity_test", "exit 0\n")
            program(d + "/bin/compute-sanitizer", "echo \"$@\"; echo '[       OK ] it'\n")
            for args, env, words in (([], {}, ("BUILD_DIR ''",)), (["/nowhere"], {}, ("BUILD_DIR '/nowhere'",)),
                                     ([d, "bogus"], {}, ("TOOL 'bogus'", "memcheck, racecheck or initcheck")),
                                     ([d, "memcheck", "bogus"], {}, ("TOOL 'bogus'",)),
                                     ([d], {"TOW_SANITIZE_ONLY": "nomatch"}, ("TOW_SANITIZE_ONLY 'nomatch'", "wkv*")),
                                     ([d, "racecheck"], {"TOW_SANITIZE_ONLY": "widened_ahead"}, ("no run of racecheck",)),
                                     *(([d], {"TOW_SANITIZE_JOBS": x}, ("TOW_SANITIZE_JOBS '%s'" % x, "1 to 256"))
                                       for x in ("abc", "-1", "1.5", "0", "04", "257", "99999999999999999999")),
                                     ([d], {"TOW_SANITIZE_SECONDS": "abc"}, ("TOW_SANITIZE_SECONDS 'abc'", "0 to 86400")),
                                     ([d], {"TOW_SANITIZE_LOGS": "/etc/passwd"}, ("TOW_SANITIZE_LOGS '/etc/passwd'",))):
                r = sanitize(*args, **env)
                self.refused(r, *words)
                self.assertEqual(r.stdout.count("\n"), 1, r.stdout)
            for args in (["--help"], [d, "--help"]):
                r = sanitize(*args)
                self.assertEqual(r.returncode, 0, r.stdout)
                for word in ("usage", "TOW_SANITIZE_SECONDS", "0: none", "cannot be used"):
                    self.assertIn(word, r.stdout)
            logs = os.path.join(d, "logs")
            for only, n in (("gemm_test 'wkv*'", 3), ("gemm_test 'wo_a*'", 3), ("", None)):  # the same folder again
                r = sanitize(d, TOW_SANITIZE_ONLY=only, TOW_SANITIZE_LOGS=logs)
                self.assertEqual(r.returncode, 0, r.stdout)
                n = n or r.stdout.count("\n") - 1
                self.assertEqual(r.stdout.splitlines()[-1], "%d passed, 0 failed" % n)
            self.assertGreater(n, 100)
            program(d + "/bin/compute-sanitizer", "echo no case of this device\n")
            r = sanitize(d, "memcheck", TOW_SANITIZE_ONLY="wkv")
            self.assertEqual((r.returncode, r.stdout.splitlines()[-1]), (1, "0 passed, 0 failed, 1 skipped"))
            program(d + "/bin/compute-sanitizer", "echo it broke; exit 3\n")
            r = sanitize(d, "memcheck", TOW_SANITIZE_ONLY="wkv")
            self.assertEqual(r.returncode, 1)
            self.assertIn("(exit 3), 0 s\nit broke\n0 passed, 1 failed", r.stdout)
            for rc, ends, said in ((77, 0, "gpu-sanitize: why: skipped\n"), (2, 2, "gpu-sanitize: why\n")):
                program(tests + "/parity_test", "echo why; exit %d\n" % rc)
                r = sanitize(d)
                self.assertEqual((r.returncode, r.stdout), (ends, said))

    def test_peers(self):
        """What is needed is told where none of it is, too."""
        r = run(sys.executable, "-S", "tests/gpu/peers.py", "--help")
        self.assertEqual(r.returncode, 0, r.stdout)
        for word in ("--flash-mla", "--deep-gemm", "--only", "sgl-flash-mla 1.0.0", "sgl-deep-gemm 0.1.3"):
            self.assertIn(word, r.stdout)
        r = run(sys.executable, "-S", "tests/gpu/peers.py")
        self.assertEqual((r.returncode, r.stdout), (77, "peers: no torch here: skipped\n"))
        self.refused(run(sys.executable, "-S", "tests/gpu/peers.py", "--only", "FlashMLA"), "--only 'FlashMLA'",
                     "part of a line's name: ", "wo_b, torch.matmul bf16")
        for only in ("FlashMLA", "torch.topk"):
            r = run(sys.executable, "-S", "tests/gpu/peers.py", "--only", only, "--flash-mla", "lib.so")
            self.assertEqual(r.returncode, 77, r.stdout)

    def test_benches(self):
        for name, args, env, words in (
                ("moe", ["T=abc"], {}, ("T= 'abc'", " 32 ", " 8192")), ("moe", ["T=7"], {}, ("T= '7'", " 8 32 ")),
                ("moe", ["moe", "T=32x"], {}, ("T= '32x'",)), ("moe", ["T=0"], {}, ("T= '0'",)),
                ("gemm", [], {"TOW_BENCH_ROWS": "abc"}, ("TOW_BENCH_ROWS 'abc'", " 64 ", "commas")),
                ("gemm", [], {"TOW_BENCH_ROWS": "1,7"}, ("TOW_BENCH_ROWS '1,7'",)),
                ("gemm", [], {"TOW_BENCH_ROWS": "1,,8"}, ("TOW_BENCH_ROWS '1,,8'",)),
                ("gemm", [], {"TOW_BENCH_TFLOPS": "abc"}, ("TOW_BENCH_TFLOPS 'abc'", "a number above 0")),
                ("gemm", [], {"TOW_BENCH_TFLOPS": "-1"}, ("TOW_BENCH_TFLOPS '-1'",)),
                ("norm", ["--late"], {}, ("argument '--late'", "--help")),
                ("attn", ["c4", "window"], {}, ("argument 'window'",)),
                ("attn", ["cuda:01"], {}, ('argument "cuda:01": must be', "0 to 255")),
                ("index", ["cuda0"], {}, ('argument "cuda0"',)), ("pages", ["cuda:x"], {}, ('argument "cuda:x"',)),
                ("sample", [""], {}, ("argument ''",))):
            bench = built("bench", "gpu", "bench_" + name)
            if not bench:
                continue
            self.refused(run(bench, *args, **env), "bench_%s: " % name, *words)
            r = run(bench, "--help")
            self.assertEqual(r.returncode, 0, r.stdout)
            self.assertIn("usage: bench_%s [PART OF A NAME] [cuda:N]" % name, r.stdout)

    def test_cpu_benches(self):
        if not built("bench", "bench_kernels"):  # by `make bench`, with the others
            return
        for name, args, words in (("kernels", ["x"], ("threads 'x'", "0 to 256")), ("kernels", ["-1"], ("threads '-1'",)),
                                  ("kernels", ["1", "x"], ("parts 'x'",)), ("kernels", ["1", ""], ("parts ''",)),
                                  ("kernels", ["1", "l", "9"], ("instruction set '9'", "0 to 3")),
                                  ("model", ["no-checkpoint", "1x"], ("threads '1x'", "0 to 256")),
                                  ("model", ["no-checkpoint", "1", "0"], ("prefill tokens '0'", "1 to 65536")),
                                  ("capture", ["no-checkpoint", "4095"], ("context tokens '4095'", "4096 to 1048576"))):
            self.refused(run(os.path.join(BUILD, "bench", "bench_" + name), *args), "bench_%s: " % name, *words)

    def test_bench_step(self):
        if not built("bench", "gpu", "bench_step"):
            return
        r = run(BENCH_STEP, "--help")
        self.assertEqual(r.returncode, 0, r.stdout)
        self.assertIn("--layers N|most", r.stdout)
        self.assertEqual(run(BENCH_STEP, "no-checkpoint", "--help").returncode, 0)
        self.assertEqual(run(BENCH_STEP).returncode, 77)
        self.assertEqual(run(BENCH_STEP, "--device", "cpu").returncode, 2)
        self.refused(run(BENCH_STEP, "no-checkpoint", "--device", "gpu"), '--device "gpu": must be', "0 to 255")
        with tempfile.TemporaryDirectory() as d:
            self.assertEqual(make_checkpoint(d).returncode, 0)
            for n in ("2", "256"):
                self.refused(run(BENCH_STEP, d, "--device", "cpu", "--layers", n), "--layers: ", "layers %s: not in 3..255" % n)
        for args, words in ((["--layers", "0"], ("--layers '0'", "most, or", "to 256")),
                            (["--layers", "1e9"], ("--layers '1e9'",)),
                            (["--batches", "1,2,3,4,5,6,7,8,9"], ("--batches", "1 to 8 numbers")),
                            (["--batches", "1x2"], ("--batches '1x2'",)),
                            (["--contexts", "0"], ("--contexts '0'",)),
                            (["--contexts", "1048577"], ("--contexts '1048577'", "1 to 1048576 each")),
                            (["--batches", "1048576"], ("--batches '1048576'", "1 to 65536 each")),
                            (["--batches", "+1"], ("--batches '+1'",)),
                            (["--steps", "08"], ("--steps '08'", "1 to 100")),
                            (["--steps", " 5"], ("--steps ' 5'",)),
                            (["--device", ""], ("--device ''", "N from 0 to 255")),
                            (["--pages-gb", "0x10"], ("--pages-gb '0x10'",)),
                            (["--pages-gb", "4 GB"], ("--pages-gb '4 GB'", "above 0")),
                            (["--pages-gb", "inf"], ("--pages-gb 'inf'",)),
                            (["--chunk", "0"], ("--chunk '0'", "1 to 65536")),
                            (["--prefill", "100", "--chunk", "64"], ("--prefill 100", "multiple of --chunk 64")),
                            (["--steps"], ("--steps ''",)),
                            (["--layer", "3"], ("'--layer'", "unknown"))):
            self.refused(run(BENCH_STEP, "no-checkpoint", *args), *words)
            self.assertEqual(run(BENCH_STEP, "no-checkpoint", *args, "--help").returncode, 0)


if __name__ == "__main__":
    unittest.main()
