#!/usr/bin/env python3
"""More than the cluster can do: a flood of long prompts against small limits, clients that leave, pools that are too small.
usage: test_flood.py BUILD_DIR [--prompts N]"""
import json
import random
import time

import harness
from harness import Cluster, Job, filler, smoke, wait_for

OPTIONS = {"prompts": 200}
# Chunks from a lone short prompt's arrival to its first token: the one in flight, one of a long prompt, its own; see
# docs/operations.md. And what may end besides while the test reads the counter, asks, and reads it again.
SHORT_CHUNKS, READING = 3, 5


def refused(status, headers, data, reasons):
    """A refusal as clients may count on it."""
    assert status in (429, 503), (status, data[:300])
    assert 1 <= int(headers["retry-after"]) <= 600, headers
    assert headers["x-towpath-reason"] in reasons, headers
    assert headers["content-type"] == "application/json" and b"data:" not in data
    return headers["x-towpath-reason"]


def chat_body(content, **more):
    return dict(dict(messages=[{"role": "user", "content": content}], temperature=0), **more)


def test_flood_of_long_prompts(build):
    """Queues stay within their limits, refusals say when and why, short requests' time to first token stays bounded."""
    limits = {"runs": 12, "tokens": 60000, "pending": 30000, "seconds": 45}
    router = ["--max-queued", str(limits["runs"]), "--max-queued-tokens", str(limits["tokens"]),
              "--queue-timeout", str(limits["seconds"])]
    with Cluster(build, router=router, workers=["--kv-pages", "160"],
                 prefill_args=["--max-pending-tokens", str(limits["pending"]), "--chunk-tokens", "256"]) as c:
        case = smoke("identity")
        want = case["greedy_text"].replace("<｜end▁of▁sentence｜>", "")
        c.chat("Who are you?")
        texts = [filler(n, n) for n in (2400, 3600, 4800, 6000)]
        sizes = [c.post("/tokenize", prompt=t)[1]["count"] for t in texts]
        assert min(sizes) >= 2500 and max(sizes) <= 12500, sizes
        seen = {"runs": 0, "tokens": 0, "pending": 0}
        over = []

        def watch():
            while not over:
                m, p = c.router.metrics(), c.prefills[0].metrics()
                seen["runs"] = max(seen["runs"], m.get_one("runs", state="queued"))
                seen["tokens"] = max(seen["tokens"], m.get_one("queued_tokens"))
                seen["pending"] = max(seen["pending"], p.get_one("queued_tokens"))
                time.sleep(0.05)  # the rate of looking, not a wait

        def long_one(i):
            status, headers, data = c.request("POST", "/v1/chat/completions", chat_body(texts[i % 4], max_tokens=4))
            if status != 200:
                return refused(status, headers, data, ("queue_full", "queue_tokens_full", "queue_timeout", "no_capacity",
                                                       "tokenizer_busy"))
            return "answered"

        def short_ones():
            times, chunks = [], []
            while not over:
                before = c.prefills[0].metric("chunks_total")
                s = c.stream(chat_body("Who are you?")).read(1)
                if s.status == 200:
                    chunks.append(int(c.prefills[0].metric("chunks_total") - before))
                    s.read()
                    assert s.text() == want and s.done, s.text()
                    times.append(s.first_token_s())
                else:
                    refused(s.status, s.headers, s.raw, ("queue_full", "queue_tokens_full", "queue_timeout"))
                    time.sleep(0.1)
            return sorted(times), sorted(chunks)
        watcher, short = Job(watch), Job(short_ones)
        start, jobs = time.monotonic(), []
        for i in range(OPTIONS["prompts"]):
            jobs.append(Job(long_one, i))
            while time.monotonic() - start < i * 0.1:  # ten a second, whatever becomes of them
                time.sleep(0.01)
        ended = [j.result(120) for j in jobs]
        over.append(True)
        watcher.result()
        times, chunks = short.result()
        assert ended.count("answered") > 0 and len(ended) - ended.count("answered") > OPTIONS["prompts"] // 4, ended
        assert 0 < seen["runs"] <= limits["runs"] and 0 < seen["tokens"] <= limits["tokens"], (seen, limits)
        assert seen["pending"] <= limits["pending"], (seen, limits)
        print("     %d answered, %d refused; most queued %d runs, %d tokens; at prefill %d; %d short ones, first token after "
              "%d chunks, %.2f s (median), %d chunks, %.2f s (worst)" % (ended.count("answered"), len(ended) - ended.count("answered"), seen["runs"],
                                                   seen["tokens"], seen["pending"], len(times), chunks[len(times) // 2],
                                                   times[len(times) // 2], chunks[-1], times[-1]), flush=True)
        assert len(times) >= 3 and chunks[-1] <= SHORT_CHUNKS + READING, chunks
        assert chunks[len(chunks) // 2] <= SHORT_CHUNKS, chunks
        c.wait_idle(30)
        # RT-03: back-pressure is no illness; the next request is served at once
        status, answer = c.chat("Who are you?")
        assert status == 200 and answer["choices"][0]["message"]["content"] == want
        assert c.is_ready() and all(p.alive() for p in c.all)


def test_queue_limits_hold(build):
    """OP-07, RT-03: limits by requests (n counts n) and by tokens, exactly; clients that leave free their places."""
    router = ["--max-queued", "6", "--max-queued-tokens", "3000", "--queue-timeout", "30"]
    with Cluster(build, prefill=0, decode=0, router=router, ready=False) as c:
        waiting = []

        def submit(**more):
            s = c.stream(chat_body("hello", **more))
            waiting.append(s)
            return s

        def queued():
            return c.metric("runs", state="queued")
        s = c.stream(chat_body("hello", n=7)).read()  # never could be taken: no use to try again
        error = json.loads(s.raw)["error"]
        assert s.status == 400 and error["param"] == "n" and "retry-after" not in s.headers, (s.headers, error)
        submit(n=4)
        wait_for("4 runs", lambda: queued() == 4)
        s = c.stream(chat_body("hello", n=3)).read()
        assert refused(s.status, s.headers, s.raw, ("queue_full",))
        submit(n=2)
        wait_for("6 runs", lambda: queued() == 6)
        start = time.monotonic()
        s = c.stream(chat_body("hello")).read()
        took = time.monotonic() - start
        refused(s.status, s.headers, s.raw, ("queue_full",))
        big = c.stream(chat_body("word " * 300000)).read()  # refused before it is tokenised
        refused(big.status, big.headers, big.raw, ("queue_full",))
        assert took < 1.0 * harness.SLACK, took
        waiting[1].leave("reset")
        wait_for("its places are free", lambda: queued() == 4)
        waiting[0].leave()
        wait_for("all places are free", lambda: queued() == 0)
        long = c.stream(chat_body(filler(2400, 1)))
        wait_for("waits", lambda: queued() == 1)
        tokens = c.metric("queued_tokens")
        assert 0 < tokens <= 3000, tokens
        s = c.stream(chat_body(filler(2400, 2))).read()
        assert refused(s.status, s.headers, s.raw, ("queue_tokens_full",))
        long.leave()
        wait_for("nothing waits", lambda: c.metric("queued_tokens") == 0)
        c.wait_idle()


def test_left_during_a_long_prefill(build):
    """KV-11, RT-02: clients leave during long prompts; prefill stops at the next chunk, a short prompt does not wait for them."""
    with Cluster(build, prefill_args=["--chunk-tokens", "128"]) as c:
        text = filler(9000, 5)
        n = c.post("/tokenize", prompt=text)[1]["count"]
        chunks = c.prefills[0].metric("chunks_total")
        whole = (n + 127) // 128
        before = c.metric("requests_cancelled_by_client_total")
        streams = [c.stream(chat_body(text, max_tokens=8)) for _ in range(5)]
        wait_for("all five are at prefill", lambda: c.metric("runs", state="prefilling") == 5, 60)
        for s in streams:
            s.leave("reset")
        start = time.monotonic()
        short = c.stream(chat_body("Who are you?")).read()
        assert short.status == 200 and short.text().startswith("I am"), short.raw
        c.wait_idle(10)
        assert c.metric("requests_cancelled_by_client_total") == before + 5
        done = c.prefills[0].metric("chunks_total") - chunks
        assert done < 5 * whole / 2, "%d chunks of %d were computed for clients that had gone" % (done, 5 * whole)
        print("     %d of %d chunks computed; the short one answered after %.2f s" % (
            done, 5 * whole, time.monotonic() - start), flush=True)
        # while it waits for pages, and before the first token
        for _ in range(3):
            streams = [c.stream(chat_body(filler(600, i), max_tokens=50)) for i in range(20)]
            for s in streams:
                s.leave("reset")
            c.wait_idle(20)


def test_tiny_pools(build):
    """KV-16, KV-15: few pages, many requests of random sizes at once: each ends whole, nothing blocks for ever."""
    rng = random.Random(1)
    with Cluster(build, decode_args=["--kv-pages", "7", "--max-batch", "8", "--reserve-tokens", "16"],
                 prefill_args=["--kv-pages", "7", "--chunk-tokens", "128"]) as c:
        for pages in (1, 7):
            ids = harness.token_ids(pages * 256 - 20, pages)
            status, answer = c.post("/v1/completions", prompt=ids, max_tokens=10, ignore_eos=True, temperature=0)
            assert status == 200 and answer["usage"]["completion_tokens"] == 10, answer
        alone, work = {}, []
        for i in range(30):
            ids, n = harness.token_ids(rng.randrange(20, 1300), i), rng.choice([4, 30, 120])
            work.append(dict(prompt=ids, max_tokens=n, ignore_eos=True, temperature=0))
        for i in (0, 7, 19):
            alone[i] = c.post("/v1/completions", **work[i])[1]["choices"][0]["text"]
        jobs = [Job(c.post, "/v1/completions", **w) for w in work]
        for i, (w, j) in enumerate(zip(work, jobs)):
            status, answer = j.result(150)
            assert status == 200 and answer["usage"]["completion_tokens"] == w["max_tokens"], (status, answer)
            assert i not in alone or answer["choices"][0]["text"] == alone[i], "answer %d depends on its company" % i
        c.wait_idle(20)


def test_never_fits(build):
    """OP-09, KV-02, KV-05: what a pool can never hold is refused at once with numbers; both sides stay free; small ones pass."""
    with Cluster(build, decode_args=["--kv-pages", "8"], prefill_args=["--kv-pages", "4"]) as c:  # 2048 and 1024 tokens
        limit = c.request("GET", "/v1/models")[2].decode()
        for n, more, good in ((1023, 1, True), (1000, 24, True), (1024, 1, None), (1000, 200, None), (1033, 5, False),
                              (2047, 1, False), (2049, 1, False), (3000, 5, False), (500, 4000, False)):
            for streamed in (False, True):
                start = time.monotonic()
                status, headers, data = c.request("POST", "/v1/completions", dict(
                    prompt=harness.token_ids(n, n), max_tokens=more, stream=streamed, ignore_eos=True))
                if good:
                    assert status == 200, (n, more, data, limit)
                elif good is False:
                    assert status in (400, 413) and headers["content-type"] == "application/json", (n, more, status, data)
                    assert any(str(x) in data.decode() for x in (n, n + more)), data
                    assert time.monotonic() - start < 5 * harness.SLACK
                else:
                    assert status in (200, 400), (n, more, status, data)
            assert c.chat("Who are you?")[0] == 200, "blocked after %d" % n
        for _ in range(30):
            status, answer = c.post("/v1/completions", prompt=harness.token_ids(1500, 1), max_tokens=5)
            assert status in (400, 413), answer
        c.wait_idle(5)
        # no max_tokens: what is left of the context, then length
        status, answer = c.post("/v1/completions", prompt=harness.token_ids(900, 2), ignore_eos=True)
        assert status == 200 and answer["choices"][0]["finish_reason"] == "length", answer
        c.wait_idle(5)


def test_burst_at_start(build):
    """KV-15: far more than it can do from the first moment on: the excess is refused, what was accepted is answered."""
    with Cluster(build, router=["--max-queued", "20", "--queue-timeout", "60"], decode_args=["--max-batch", "4"]) as c:
        jobs = [Job(c.request, "POST", "/v1/chat/completions", chat_body(filler(150, i), max_tokens=32, ignore_eos=True))
                for i in range(150)]
        ended = [j.result(120) for j in jobs]
        good = sum(s == 200 for s, _, _ in ended)
        for status, headers, data in ended:
            if status != 200:
                refused(status, headers, data, ("queue_full", "queue_timeout"))
        assert good >= 20, good
        c.wait_idle(20)
        m = c.router.metrics()
        assert m.get_one("requests_failed_total") == m.get_one("runs_failed_total") == sum(
            h.get("x-towpath-reason") == "queue_timeout" for _, h, _ in ended)


def test_health_while_busy(build):
    """OP-02: /health and /metrics of every process answer while long prompts are computed."""
    with Cluster(build, prefill_args=["--chunk-tokens", "2048"]) as c:
        jobs = [Job(c.chat, filler(3000, i), max_tokens=4) for i in range(4)]
        times = []
        while any(j.is_alive() for j in jobs):
            for p in c.all:
                start = time.monotonic()
                assert harness.http_call(p.port, "GET", "/health")[0] == 200
                times.append(time.monotonic() - start)
        for j in jobs:
            assert j.result()[0] == 200
        times.sort()
        assert times[int(len(times) * 0.99)] < 1.0 * harness.SLACK, times[-5:]


if __name__ == "__main__":
    harness.main([test_queue_limits_hold, test_flood_of_long_prompts, test_left_during_a_long_prefill, test_tiny_pools,
                  test_never_fits, test_burst_at_start, test_health_while_busy], __doc__, OPTIONS)
