#!/usr/bin/env python3
"""DS-16 through the cluster: one value asked for among 15,000 to 16,000 tokens of files, the longest that the demo model was made for.
usage: test_recall.py BUILD_DIR

The documents come from the model's own generator (deploy/demo-model/recipe/datagen.py), by seed; it never saw these."""
import os
import random
import sys

import harness
from harness import Cluster

sys.path.insert(0, os.path.join(harness.MODEL, "recipe"))
import datagen  # noqa: E402

SEEDS = (319, 306)  # the value lies after 8 % and after 71 % of the text


def document(seed):
    """(text with a question, the value asked for)."""
    source = random.Random(seed)
    while True:
        made = datagen.recall(source, 18900, one=True)
        value = made["probes"][0][1]
        if value != "not mentioned" and len(value) >= 8 and made["messages"][0]["role"] == "user":
            return made["messages"][0]["content"], value


def test_recall_at_16k(build):
    with Cluster(build) as c:
        for seed in SEEDS:
            text, value = document(seed)
            assert text.count(value) == 1
            s = c.stream(dict(messages=[{"role": "user", "content": text}], temperature=0, max_tokens=60,
                              stream_options={"include_usage": True})).read()
            assert s.status == 200 and s.done, (s.status, s.raw, s.error)
            n = s.events[-1]["usage"]["prompt_tokens"]
            assert 15000 < n <= 16384, n
            assert value in s.text() and s.finish() == "stop", (value, s.text())
            print("     %d tokens, value at %d %%: %r, first token after %.1f s" % (
                n, 100 * text.find(value) / len(text), s.text(), s.first_token_s()), flush=True)
        c.wait_idle()


if __name__ == "__main__":
    harness.main([test_recall_at_16k], __doc__)
