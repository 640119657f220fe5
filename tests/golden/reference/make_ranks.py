#!/usr/bin/env python3
"""Index scores of the `native` checkpoint by the key types that its full end-to-end goldens lack.

    python3 make_ranks.py DATA_DIR          (tests/golden/data)

Prompts and recorded positions are those of native/expected/fp4-T.safetensors. Layers below the first indexer
do not depend on the key type, so these scores are also what keys of another type give beside those that select.
Checked on the way: the scores of fp4 keys and, where they are stored, the lists of the others come out again.
"""
import os
import sys
import torch
import v4ref as R


def main(data):
    torch.set_grad_enabled(False)
    expected = os.path.join(data, "native", "expected")
    for T in (300, 517):
        golden = R.load_safetensors(os.path.join(expected, "fp4-%d.safetensors" % T))
        prompt, pos = golden["prompt"].t.to(torch.int64), golden["positions"].t.to(torch.int64)
        out = {"prompt": golden["prompt"], "positions": golden["positions"]}
        for fmt in ("fp4", "fp8", "bf16"):
            model = R.V4Model.load(os.path.join(data, "native", "checkpoint"), mode="deployed", index_fmt=fmt)
            for i, cap in enumerate(model.forward(prompt, model.new_cache(), capture=True)["layers"]):
                if "index_scores" not in cap:
                    continue
                name = "layers.%d.index_" % i
                scores = cap["index_scores"][pos].to(torch.float32)
                if fmt == "fp4":
                    seen = torch.isfinite(scores)
                    assert (scores - golden[name + "scores"].t)[seen].abs().max() < 1e-6
                    continue
                out["%sscores.%s" % (name, fmt)] = scores
                other = os.path.join(expected, "%s-%d.safetensors" % (fmt, T))
                if os.path.exists(other):
                    stored = R.load_safetensors(other)
                    assert torch.equal(stored["prompt"].t, golden["prompt"].t)
                    assert torch.equal(stored[name + "selected"].t, cap["index_selected"])
        R.save_safetensors(os.path.join(expected, "ranks-%d.safetensors" % T), out, meta={"variant": "ranks", "length": T})


if __name__ == "__main__":
    main(sys.argv[1])
