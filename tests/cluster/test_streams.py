#!/usr/bin/env python3
"""64 streams at once whose clients leave at random times; afterwards everything is back at its idle value on all processes.
usage: test_streams.py BUILD_DIR [--waves N]"""
import random

import harness
from harness import Cluster, Job, filler, wait_for

OPTIONS = {"waves": 3, "streams": 64}


def body(rng):
    words = rng.choice([3, 3, 20, 60, 200, 600])
    more = rng.choice([{}, {}, {"n": 2}, {"logprobs": True, "top_logprobs": 3}, {"stop": "zzzz"}])
    return dict(dict(messages=[{"role": "user", "content": filler(words, rng.random())}], ignore_eos=True,
                     max_tokens=rng.choice([4, 16, 40]), temperature=rng.choice([0, 1]), seed=rng.randrange(1000)), **more)


def one(cluster, seed):
    """One client: stays to the end, or leaves before the first event or after some; how it ended."""
    rng = random.Random(seed)
    ask = body(rng)
    s = cluster.stream(ask)
    kind = rng.choice(["stay", "stay", "fin", "reset", "at once", "silent"])
    if kind == "at once":
        s.leave(rng.choice(["fin", "reset"]))
        return "left"
    if kind == "silent":  # leaves while it waits, at a random time
        s.socket.settimeout(rng.random() * 0.5)
        try:
            s.read()
        except TimeoutError:
            s.leave(rng.choice(["fin", "reset"]))
            return "left"
    if kind == "stay":
        if rng.random() < 0.3:
            s.leave("half")
        s.read()
    if kind in ("stay", "silent"):
        assert s.status == 200 and s.done and s.error is None, (s.status, s.raw, s.error)
        for i in range(ask.get("n", 1)):
            assert s.finish(i) == "length", s.finish(i)
            if ask.get("logprobs"):
                assert len(s.tokens(i)) == ask["max_tokens"]
        return "answered"
    s.read(rng.randrange(1, 12))
    if s.done:
        return "answered"
    s.leave(kind)
    return "left"


def wave(cluster, seed, n):
    jobs = [Job(one, cluster, seed * 1000 + i) for i in range(n)]
    ended = [j.result() for j in jobs]
    assert ended.count("answered") > 0 and ended.count("left") > 0, ended
    cluster.wait_idle(30)


def test_64_streams(build):
    with Cluster(build, decode_args=["--max-batch", "32"]) as c:
        for i in range(2):
            wave(c, 900 + i, OPTIONS["streams"])  # thread pools, arenas and buffers reach their size
        wait_for("connections closed", lambda: c.metric("http_connections") == 1)
        before = c.measure()
        threads = {p.name: p.threads() for p in c.all}
        for i in range(OPTIONS["waves"]):
            wave(c, i, OPTIONS["streams"])
        c.wait_measure(before)
        assert threads == {p.name: p.threads() for p in c.all}
        m = c.router.metrics()
        assert m.get_one("runs_failed_total") == 0 and m.get_one("requests_cancelled_by_client_total") > 0
        # move_bad_offers_total may count: an offer can cross the cancel of its ticket on the way.
        for name in ("move_bad_digests_total", "move_leases_expired_total", "move_endpoint_errors_total"):
            for w in c.workers:
                assert w.metric(name) == 0, (w.name, name)
        status, answer = c.chat("Who are you?")
        assert status == 200 and answer["choices"][0]["message"]["content"].startswith("I am the Towpath")


def test_all_leave(build):
    """OP-05, RT-09: every one of 200 requests is left, in mixed phases; gauges and sums come out exactly."""
    def leave(c, seed):
        rng = random.Random(seed)
        s = c.stream(dict(body(rng), max_tokens=400))
        if rng.random() < 0.6:
            s.read(rng.randrange(1, 6))
        s.leave(rng.choice(["fin", "reset"]))
    with Cluster(build, prefill=2, decode=2) as c:
        for part in range(4):
            for j in [Job(leave, c, part * 50 + i) for i in range(50)]:
                j.result()
            if part == 1:  # a worker goes and another comes in the middle of it
                c.decodes[1].restart()
        c.wait_idle(30)
        c.wait_ready()
        m = c.router.metrics()
        assert m.get_one("requests_started_total") == m.get_one("requests_cancelled_total") + m.get_one(
            "requests_finished_total") + m.get_one("requests_failed_total")
        for name, w in c.admin().items():
            assert w["load"]["our_tickets"] == 0 and w["load"]["our_pages"] == 0, (name, w)


if __name__ == "__main__":
    harness.main([test_64_streams, test_all_leave], __doc__, OPTIONS)
