#!/usr/bin/env python3
"""index_capture through router, prefill and decode: the ranks of a span are the same whatever way it took, cost nobody else a token,
and leave nothing behind. usage: test_capture_ways.py BUILD_DIR"""
import json

import harness
from harness import Cluster, Job, token_ids, wait_for

LAYERS = [2, 4, 6]  # of the demo model, those with an indexer
SHADOWS = ["bf16", "fp8", "fp4"]
ON = ["--index-capture"]
SPAN = [[120, 131], [3, 4]]
ENTRIES = [0, 1] + list(range(30, 34))


def ask(cluster, ids, capture, n=6, **more):
    """(index_capture of the answer, its text)."""
    body = dict(dict(prompt=ids, temperature=0, max_tokens=n, ignore_eos=True, index_topk=16), **more)
    if capture is not None:
        body["index_capture"] = dict({"spans": SPAN}, **capture)
    status, answer = cluster.post("/v1/completions", **body)
    assert status == 200, answer
    got = answer["towpath"]["index_capture"] if capture is not None else None
    assert capture is not None or "towpath" not in answer
    return got, answer["choices"][0]["text"]


def check_ranks(keys, topk, visible):
    scores = {}
    for e in keys["entries"]:
        assert 1 <= e["rank"] <= visible and 0 <= e["equal"] < visible
        assert e["selected"] == (e["rank"] <= topk)
        scores[e["rank"]] = e["score"]
        if e["selected"]:
            assert e["score"] >= keys["kth_score"]
        else:
            assert e["score"] <= keys["next_score"] <= keys["kth_score"]
    assert len(scores) == len(keys["entries"]), "two entries of one rank"
    falling = [scores[r] for r in sorted(scores)]
    assert falling == sorted(falling, reverse=True)


def check_steps(c, n_prompt, steps, shadow=(), topk=16, lists=False, layers=LAYERS):
    """Everything the answer says must agree with itself."""
    assert c["prompt_tokens"] == n_prompt
    assert [s["step"] for s in c["steps"]] == steps, [s["step"] for s in c["steps"]]
    for s in c["steps"]:
        visible = (n_prompt + s["step"]) // 4
        assert [l["layer"] for l in s["layers"]] == layers
        for l in s["layers"]:
            assert (l["topk"], l["visible"]) == (topk, visible), l
            assert [e["entry"] for e in l["entries"]] == [e for e in ENTRIES if e < visible]
            for e in l["entries"]:
                assert e["tokens"] == [max(0, 4 * e["entry"] - 4), 4 * e["entry"] + 4]
            check_ranks(l, topk, visible)
            assert sorted(l.get("shadow", {})) == sorted(shadow)
            for keys in l.get("shadow", {}).values():
                check_ranks(keys, topk, visible)
            assert ("list" in l) == lists
            if lists:
                assert len(l["list"]) == min(topk, visible) and l["list"] == sorted(set(l["list"]))
                for e in l["entries"]:
                    assert e["selected"] == (e["entry"] in l["list"])


def layers_of(c):
    return {s["step"]: s["layers"] for s in c["steps"]}


def test_chunks_and_hand_over(build):
    """Ranks are the same to the last bit at any chunk size, and a row decode computed is what prefill would have found."""
    exact, ids = {}, {n: token_ids(n, n) for n in (140, 257, 700)}
    for chunk in (64, 200, 512):
        with Cluster(build, router=ON, prefill_args=["--chunk-tokens", str(chunk)]) as c:
            for n, prompt in ids.items():
                plain = ask(c, prompt, None)[1]
                got, text = ask(c, prompt, {"steps": "all", "shadow": SHADOWS, "lists": True})
                assert text == plain, "a capture changes the answer"
                check_steps(got, n, list(range(6)), SHADOWS, lists=True)
                assert exact.setdefault(n, got) == got, "chunks of %d change the ranks" % chunk
                for l in (l for s in got["steps"] for l in s["layers"]):
                    own = {e["entry"]: (e["rank"], e["equal"], e["score"]) for e in l["entries"]}
                    fp4 = {e["entry"]: (e["rank"], e["equal"], e["score"]) for e in l["shadow"]["fp4"]["entries"]}
                    assert own == fp4, "the cache's own type as a shadow is another"
                if chunk != 200:
                    continue
                tokens = [s["token"] for s in got["steps"]]
                for i in (1, 4, 5):
                    again, _ = ask(c, prompt + tokens[:i], {"shadow": SHADOWS, "lists": True}, n=1)
                    assert again["steps"][0]["layers"] == layers_of(got)[i], "step %d of %d tokens" % (i, n)
            c.wait_idle()


def test_what_is_asked_for(build):
    """Steps, layers, texts, streams; no shadow keys are held where none are asked for."""
    prompt = token_ids(300, 7)
    with Cluster(build, router=ON) as c:
        whole, text = ask(c, prompt, {"steps": "all"}, n=8)
        check_steps(whole, 300, list(range(8)))
        assert [s["phase"] for s in whole["steps"]] == ["prefill"] + 7 * ["decode"]
        assert not whole["truncated"]
        for more, steps in (({}, [0]), ({"steps": "decode"}, list(range(1, 8))),
                            ({"steps": "decode", "max_steps": 3}, [1, 2, 3]),
                            ({"steps": "all", "max_steps": 1}, [0, 1])):
            got, _ = ask(c, prompt, more, n=8)
            check_steps(got, 300, steps)
            assert got["truncated"] == ("max_steps" in more)
            assert all(layers_of(got)[s] == layers_of(whole)[s] for s in steps)
        got, _ = ask(c, prompt, {"layers": [4]}, n=1)
        check_steps(got, 300, [0], layers=[4])
        assert got["steps"][0]["layers"] == [l for l in whole["steps"][0]["layers"] if l["layer"] == 4]
        got, _ = ask(c, prompt, {}, n=1, index_topk=64)
        check_steps(got, 300, [0], topk=64)

        content = "The code of the door is 7291. " + harness.filler(200, 3) + " What is the code?"
        capture = {"spans": {"text": "7291"}, "steps": "all", "expect": "7291"}
        status, answer = c.chat(content, max_tokens=8, index_capture=capture)
        assert status == 200, answer
        got = answer["towpath"]["index_capture"]
        span = got["spans"][0]
        assert "7291" in span["text"] and span["entries"] == list(range(span["start"] // 4, (span["end"] - 1) // 4 + 2))
        found = "7291" in answer["choices"][0]["message"]["content"]
        assert got["verdict"]["found"] == found
        best = min(e["rank"] for s in got["steps"] for l in s["layers"] for e in l["entries"])
        assert got["verdict"]["best_rank"] == best
        s = c.stream(dict(messages=[{"role": "user", "content": content}], temperature=0, max_tokens=8,
                          index_capture=capture)).read()
        assert s.status == 200 and s.done and s.events[-1]["choices"] == []
        assert s.events[-1]["towpath"]["index_capture"] == got
        assert all("towpath" not in e for e in s.events[:-1])
        c.wait_idle()


def refused(cluster, capture, *parts, **more):
    status, answer = cluster.post("/v1/completions", **dict(
        dict(prompt=token_ids(300, 7), max_tokens=1, index_capture=capture), **more))
    assert status == 400, answer
    for p in parts:
        assert p in json.dumps(answer["error"]), (p, answer)
    return answer["error"]


def test_refusals(build):
    """What cannot be answered is said at once, by field; a worker that keeps no shadow keys says so."""
    with Cluster(build) as c:
        assert refused(c, {"spans": SPAN})["code"] == "index_capture_disabled"
        c.wait_idle()
    with Cluster(build, router=ON, workers=["--numerics", "exact"]) as c:
        for capture, parts in (({"spans": [[299, 301]]}, ["index_capture.spans", "300"]),
                               ({"spans": {"text": "no such text"}}, ["index_capture.spans"]),
                               ({"spans": SPAN, "layers": [3]}, ["index_capture.layers", "2, 4, 6"]),
                               ({"spans": SPAN, "shadow": ["fp2"]}, ["index_capture.shadow"]),
                               ({"spans": SPAN, "steps": "last"}, ["index_capture.steps"]),
                               ({"spans": SPAN, "stpes": "all"}, ["index_capture", "stpes", "max_steps"]),
                               ({"spans": SPAN, "max_steps": 0}, ["index_capture.max_steps"])):
            assert refused(c, capture, *parts)["code"] == "invalid_index_capture", capture
        refused(c, {"spans": SPAN}, "index_capture", n=2)
        status, answer = c.post("/v1/completions", prompt=token_ids(300, 7), max_tokens=1,
                                index_capture={"spans": SPAN, "shadow": ["bf16"]})
        assert status >= 400 and "capture.shadow" in answer["error"]["message"], answer
        got, _ = ask(c, token_ids(300, 7), {"steps": "all"})
        check_steps(got, 300, list(range(6)))
        c.wait_idle()


def test_in_company(build):
    """Captures with and without shadow keys beside other requests, in pools so small that sequences give way: each gets the
    ranks and the tokens it gets alone, and every page comes back."""
    lengths = (140, 300, 420, 700, 900)
    with Cluster(build, router=ON, workers=["--kv-pages", "24"], decode_args=["--reserve-tokens", "16"]) as c:
        def one(i, capture):
            return ask(c, token_ids(lengths[i % 5], i), capture, n=40)
        asks = [{"steps": "all", "shadow": SHADOWS}, None, {"steps": "all"}, {"steps": "decode", "shadow": ["fp8"]}, None]
        alone = [one(i, asks[i % 5]) for i in range(10)]
        c.wait_idle()
        for _ in range(2):
            jobs = [Job(one, i, asks[i % 5]) for i in range(10)]
            for want, job in zip(alone, jobs):
                got = job.result()
                assert got[1] == want[1]
                if want[0] is not None:
                    # A row may be computed again by prefill when its sequence gave way.
                    assert layers_of(got[0]) == layers_of(want[0])
        c.wait_idle()


def test_client_leaves(build):
    """A captured stream that is closed in the middle gives everything back."""
    with Cluster(build, router=ON) as c:
        for how in ("fin", "reset"):
            s = c.stream(dict(prompt=token_ids(700, 1), temperature=0, max_tokens=400, ignore_eos=True,
                              index_capture={"spans": SPAN, "steps": "all", "max_steps": 4096, "shadow": SHADOWS}),
                         path="/v1/completions").read(3)
            assert s.status == 200
            s.leave(how)
        c.wait_idle()


def test_decode_dies(build):
    """SIGKILL of the decode worker in the middle: the rows go on elsewhere, and the one in between comes from the prefill that
    computes the sequence again."""
    ids = token_ids(300, 11)
    body = dict(prompt=ids, temperature=0, max_tokens=120, ignore_eos=True, index_topk=16,
                index_capture={"spans": SPAN, "steps": "all", "max_steps": 4096, "shadow": SHADOWS})
    with Cluster(build, decode=2, router=ON) as c:
        want, text = ask(c, ids, {"steps": "all", "max_steps": 4096, "shadow": SHADOWS}, n=120)
        check_steps(want, 300, list(range(120)), SHADOWS)
        for d in c.decodes:  # whichever gets it dies at its 80th token; the other one has 40 left
            d.restart("--fault", "send.TOKENS=80:kill")
        c.wait_ready()
        s = c.stream(body, path="/v1/completions").read()
        assert s.status == 200 and s.done and s.error is None, (s.status, s.error)
        got = s.events[-1]["towpath"]["index_capture"]
        assert s.text() == text
        assert layers_of(got) == layers_of(want), sorted(set(layers_of(want)) - set(layers_of(got)))
        assert [x["phase"] for x in got["steps"]] == ["prefill"] + 119 * ["decode"]
        dead = wait_for("one is dead", lambda: [d for d in c.decodes if not d.alive()])
        assert len(dead) == 1
        dead[0].start()
        c.wait_ready()
        c.wait_idle()


if __name__ == "__main__":
    harness.main([test_chunks_and_hand_over, test_what_is_asked_for, test_refusals, test_in_company, test_client_leaves,
                  test_decode_dies], __doc__)
