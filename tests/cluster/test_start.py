#!/usr/bin/env python3
"""The first request after start is sent before the workers are up, and is answered: every time.
usage: test_start.py BUILD_DIR [--starts N]"""
import random
import time

import harness
from harness import Cluster, Job, free_port, smoke, wait_for

OPTIONS = {"starts": 8}


def start_once(build, seed):
    rng = random.Random(seed)
    port, control = free_port(), None
    if rng.random() < 0.5:
        control = "tcp://127.0.0.1:%d" % free_port()
    n_prefill, n_decode = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
    with Cluster(build, prefill=n_prefill, decode=n_decode, control=control, start=False, http_port=port) as c:
        order = c.workers
        rng.shuffle(order)
        early = rng.randrange(len(order)) if rng.random() < 0.5 else 0  # some are started before the router
        for w in order[:early]:
            w.start()
        c.router.start().wait_up()
        assert c.port == port
        case = smoke(rng.choice(["identity", "prefill", "capitals", "honest"]))
        assert c.request("GET", "/ready")[0] == 503, "ready without workers"
        ask = Job(c.chat, case["messages"])
        wait_for("the request waits", lambda: c.metric("runs_started_total") == 1)
        for w in order[early:]:
            time.sleep(rng.random() * 0.2)  # part of the input: workers come at different times
            w.start()
        status, answer = ask.result(60)
        assert status == 200, (seed, status, answer)
        text = answer["choices"][0]["message"]["content"]
        assert text == case["greedy_text"].replace("<｜end▁of▁sentence｜>", ""), (seed, text)
        c.wait_ready()
        c.wait_idle()
        for p in c.workers + [c.router]:  # and it can be stopped in order
            p.terminate()
            assert p.wait(20) == 0, "%s: exit %s" % (p.name, p.popen.returncode)


def test_first_request(build):
    for seed in range(OPTIONS["starts"]):
        start_once(build, seed)


def test_nobody_comes(build):
    """The wait has an end: 503 with Retry-After and a reason."""
    with Cluster(build, prefill=0, decode=0, router=["--queue-timeout", "1"], ready=False) as c:
        for streamed in (False, True):
            start = time.monotonic()
            status, headers, data = c.request("POST", "/v1/chat/completions", {
                "messages": [{"role": "user", "content": "x"}], "stream": streamed})
            took = time.monotonic() - start
            assert status == 503 and 0.9 < took < 5 * harness.SLACK, (status, took)
            assert headers["content-type"] == "application/json" and b"data:" not in data
            assert 1 <= int(headers["retry-after"]) <= 600 and headers["x-towpath-reason"] == "no_capacity", headers
        c.wait_idle()


if __name__ == "__main__":
    harness.main([test_first_request, test_nobody_comes], __doc__, OPTIONS)
