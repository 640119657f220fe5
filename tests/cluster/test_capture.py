#!/usr/bin/env python3
"""index_capture through a real cluster: ranks that agree with what is selected, the same in streams and whole
answers, with chunks, next to other requests, after the loss of a worker; and what it must not change.
usage: test_capture.py BUILD_DIR"""
import harness
from harness import Cluster, Job

LAYERS = [2, 4, 6]  # of the demo model: ratio 4
SECRET = "the word of the day is kumquat"


def prompt(lines, at=0.5):
    """A question about a fact in the middle of that many lines."""
    text = ["Line %d of the log: pump %d ran for %d minutes at %d degrees." % (i, i * 7 % 13, i * 31 % 60, i * 17 % 90)
            for i in range(lines)]
    text.insert(int(lines * at), "Remember: %s." % SECRET)
    return "\n".join(text) + "\nWhat is the word of the day?"


def ask(c, lines, capture, **more):
    body = dict(dict(temperature=0, max_tokens=16, messages=[{"role": "user", "content": prompt(lines)}]), **more)
    if capture is not None:
        body["index_capture"] = capture
    status, answer = c.post("/v1/chat/completions", **body)
    assert status == 200, answer
    return answer, answer.get("towpath", {}).get("index_capture")


def check(c, topk=64, shadow=(), lists=True):
    """What must hold of any capture."""
    want = sorted({e for s in c["spans"] for e in s["entries"]})
    for step in c["steps"]:
        assert [l["layer"] for l in step["layers"]] == LAYERS, step
        for l in step["layers"]:
            assert l["topk"] == topk and l["visible"] <= (c["prompt_tokens"] + step["step"]) // 4 + 1, l
            assert [e["entry"] for e in l["entries"]] == [e for e in want if e < l["visible"]]
            assert sorted(l.get("shadow", {})) == sorted(shadow)
            for keys in [l] + list(l.get("shadow", {}).values()):
                for e in keys["entries"]:
                    assert 1 <= e["rank"] <= l["visible"] and e["selected"] == (e["rank"] <= topk), e
                    if keys["kth_score"] is not None:
                        assert e["score"] >= keys["kth_score"] if e["selected"] else e["score"] <= keys["next_score"]
                if l["visible"] > topk:
                    assert keys["kth_score"] >= keys["next_score"]
            if lists:
                assert len(l["list"]) == min(topk, l["visible"]) and l["list"] == sorted(set(l["list"]))
                for e in l["entries"]:
                    assert (e["entry"] in l["list"]) == e["selected"], e
            else:
                assert "list" not in l


def test_ranks_agree_with_selection(build):
    all_keys = ["bf16", "fp8", "fp4"]
    # chunks of 256 tokens: the prompt comes in several
    with Cluster(build, router=["--index-capture"], prefill_args=["--chunk-tokens", "256"]) as c:
        plain, none = ask(c, 60, None)
        assert none is None and "towpath" not in plain
        whole, first = ask(c, 60, {"spans": {"text": SECRET}, "steps": "all", "shadow": all_keys, "lists": True,
                                   "expect": "kumquat"})
        assert whole["choices"] == plain["choices"] and whole["usage"] == plain["usage"]
        check(first, shadow=all_keys)
        assert first["prompt_tokens"] == whole["usage"]["prompt_tokens"] > 1000
        span = first["spans"][0]
        assert SECRET in span["text"] and span["entries"][0] == span["start"] // 4
        assert [s["phase"] for s in first["steps"]] == ["prefill"] + ["decode"] * (len(first["steps"]) - 1)
        assert len(first["steps"]) >= whole["usage"]["completion_tokens"]
        v, found = first["verdict"], "kumquat" in whole["choices"][0]["message"]["content"]
        ranks = [e["rank"] for x in first["steps"] for l in x["layers"] for e in l["entries"]]
        assert (v["best_rank"], v["found"]) == (min(ranks), found), v
        assert v["name"] == ("selected" if found else "downstream") or min(ranks) > 64, v
        print("     %r, %s" % (whole["choices"][0]["message"]["content"], first["verdict"]["text"]), flush=True)

        # the same by tokens, streamed, and beside others
        others = [Job(ask, c, 20 + i, None) for i in range(3)]
        s = c.stream(dict(messages=[{"role": "user", "content": prompt(60)}], temperature=0, max_tokens=16,
                          index_capture={"spans": [[span["start"], span["end"]]], "steps": "all",
                                         "shadow": all_keys, "lists": True, "expect": "kumquat"})).read()
        for job in others:
            job.result()
        assert s.status == 200 and s.done and s.text() == plain["choices"][0]["message"]["content"]
        assert s.events[-1]["choices"] == [] and "usage" not in s.events[-1]
        assert s.events[-1]["towpath"]["index_capture"] == first

        # fewer of everything
        _, last = ask(c, 60, {"spans": {"text": SECRET}})
        check(last, lists=False)
        assert [x["step"] for x in last["steps"]] == [0]
        assert [l["entries"] for l in last["steps"][0]["layers"]] == [l["entries"] for l in first["steps"][0]["layers"]]
        _, some = ask(c, 60, {"spans": {"text": SECRET}, "steps": "decode", "max_steps": 2, "layers": [4]},
                      ignore_eos=True)
        assert [x["step"] for x in some["steps"]] == [1, 2] and some["truncated"] is True
        assert all([l["layer"] for l in x["layers"]] == [4] for x in some["steps"])

        # top-k per request moves the border and no rank
        for topk in (8, 128):
            _, other = ask(c, 60, {"spans": {"text": SECRET}, "lists": True}, index_topk=topk)
            check(other, topk=topk)
            ours, theirs = first["steps"][0]["layers"][0], other["steps"][0]["layers"][0]
            assert [e["rank"] for e in ours["entries"]] == [e["rank"] for e in theirs["entries"]]

        # a stop string ends the answer; the row of prefill is there all the same
        content = plain["choices"][0]["message"]["content"]
        if len(content) > 1:
            stopped, rows = ask(c, 60, {"spans": {"text": SECRET}}, stop=[content[1]])
            assert stopped["choices"][0]["finish_reason"] == "stop"
            assert rows["steps"] == last["steps"]
        c.wait_idle()


def test_goes_on_after_the_loss_of_a_worker(build):
    capture = {"spans": {"text": SECRET}, "steps": "all", "lists": True}
    body = dict(messages=[{"role": "user", "content": prompt(30)}], temperature=0, max_tokens=60, ignore_eos=True,
                index_capture=capture)
    with Cluster(build, decode=2, router=["--index-capture"]) as c:
        s = c.stream(body).read()
        want, rows = s.text(), s.events[-1]["towpath"]["index_capture"]
        check(rows)
        assert [x["step"] for x in rows["steps"]] == list(range(60))
        s = c.stream(body).read(5)
        busy = [d for d in c.decodes if c.admin()[d.name]["load"]["our_tickets"]]
        assert len(busy) == 1
        busy[0].kill()
        s.read()
        assert s.status == 200 and s.done and s.text() == want, (s.raw, s.error)
        again = s.events[-1]["towpath"]["index_capture"]
        check(again)
        have = {x["step"]: x for x in again["steps"]}
        assert len(have) >= 55, sorted(have)
        for x in rows["steps"]:
            if x["step"] in have:
                assert have[x["step"]]["token"] == x["token"]


def test_shadow_keys_take_room_and_give_it_back(build):
    pages = 12
    args = ["--kv-pages", str(pages)]
    with Cluster(build, router=["--index-capture"], workers=["--index-keys", "fp8"] + args) as c:
        before, rows = ask(c, 60, {"spans": {"text": SECRET}})
        page_tokens = c.admin()["p1"]["capacity"]["page_tokens"]
        lines = int(60 * pages * page_tokens * 0.7 / rows["prompt_tokens"])
        answer, _ = ask(c, lines, {"spans": {"text": SECRET}})
        big = {"spans": {"text": SECRET}, "shadow": ["bf16"]}
        status, refused = c.post("/v1/chat/completions", max_tokens=8,
                                 messages=[{"role": "user", "content": prompt(lines)}],
                                 index_capture=big)
        assert status == 400 and refused["error"]["code"] == "context_length_exceeded", refused
        assert "index_capture.shadow is %d tokens" % (pages // 2 * page_tokens) in refused["error"]["message"], refused
        for _ in range(4):
            _, rows = ask(c, int(lines / 2), big)
            check(rows, shadow=["bf16"], lists=False)
        # without max_tokens the answer may fill what is left
        answer, _ = ask(c, int(lines * 0.69), big, max_tokens=None, ignore_eos=True)
        assert answer["usage"]["total_tokens"] == pages // 2 * page_tokens, answer["usage"]
        c.wait_idle()


def test_off_by_default(build):
    with Cluster(build) as c:
        status, answer = c.post("/v1/chat/completions", index_capture={"spans": [[0, 1]]},
                                messages=[{"role": "user", "content": "x"}])
        assert status == 400 and answer["error"]["code"] == "index_capture_disabled", answer
        assert answer["error"]["param"] == "index_capture"


if __name__ == "__main__":
    harness.main([test_ranks_agree_with_selection, test_goes_on_after_the_loss_of_a_worker,
                  test_shadow_keys_take_room_and_give_it_back, test_off_by_default], __doc__)
