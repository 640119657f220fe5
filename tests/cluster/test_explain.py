#!/usr/bin/env python3
"""Recorded requests, and towpath-ctl explain on them: what a cluster answered is what one process computes, whatever way it took.
usage: test_explain.py BUILD_DIR

Recording is bounded, has its own file mode, never fails a request, and is not there unless asked for."""
import json
import os
import subprocess

import harness
from harness import Cluster, filler, wait_for

MUST = ("again", "chunk", "batch", "handover", "prefix", "resume", "threads")


def explain(cluster, what, *flags):
    """(exit status, report or None, stderr)."""
    done = subprocess.run([os.path.join(harness.ROOT, cluster.build, "bin", "towpath-ctl"), "explain", what, "--model",
                           harness.MODEL, "--threads", "2", "--json"] + list(flags),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120 * harness.SLACK)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr.decode()


def folder_of(cluster):
    return os.path.join(cluster.dir, "records")


def recording(build, router=(), **more):
    """A cluster that records below its own folder."""
    c = Cluster(build, start=False, **more)
    c.router.argv += ["--record-dir", folder_of(c)] + list(router)
    try:
        c.router.start().wait_up()
        for w in c.workers:
            w.start()
        c.wait_ready()
    except BaseException:
        c.report()
        c.close()
        raise
    return c


def record_of(cluster, request_id):
    path = os.path.join(folder_of(cluster), request_id + ".json")
    wait_for("the record of " + request_id, lambda: os.path.exists(path))
    with open(path) as f:
        return json.load(f)


def files(cluster):
    return sorted(name for name in os.listdir(folder_of(cluster)) if name != ".lock")


def is_what_was_sent(cluster, stream, record):
    """Token by token: the bytes that came are those of the recorded ids."""
    ids, sent = record["choices"][0]["output"], [b for b, _ in stream.tokens()]
    assert len(ids) == len(sent), (len(ids), len(sent))
    for i, b in zip(ids, sent):
        status, said = cluster.post("/detokenize", tokens=[i])
        assert status == 200 and said["prompt"] == b.decode(errors="replace"), (i, b, said)


def is_good(cluster, request_id, *flags, rows=MUST):
    status, report, err = explain(cluster, request_id, "--record-dir", folder_of(cluster), *flags)
    assert status == 0, (status, report and report["verdict"], err)
    assert report["good"] and report["failed"] == 0 and report["tokens"]["drawn_again"], report["verdict"]
    must = [r for r in report["rows"] if r["must_be_identical"]]
    for r in must:
        assert r["result"] in ("PASS", "not run") and r["differ"] == 0, r
    ran = {r["name"].split(".")[0] for r in must if r["result"] == "PASS"}
    assert ran == set(rows), ran
    assert ("Disaggregation is ruled out" in report["verdict"]) == ("handover" in ran), report["verdict"]
    return report


def test_an_answer_is_the_models_own(build):
    """Plain, streamed with a seed and penalties, several choices, a prompt of several pages: each is drawn again from its record."""
    secret = "record-key-1"
    with recording(build, prefill_args=["--chunk-tokens", "100"]) as c:
        status, plain = c.chat("Who are you?", max_tokens=20)
        assert status == 200
        rec = record_of(c, plain["id"])
        assert rec["towpath_record"] == 1 and rec["id"] == plain["id"]
        assert len(rec["choices"][0]["output"]) == plain["usage"]["completion_tokens"]
        assert len(rec["prompts"][0]) == plain["usage"]["prompt_tokens"]
        assert [w["name"] for w in rec["workers"]] == ["p1", "d1"] and rec["workers"][0]["chunk_tokens"] == 100
        is_good(c, plain["id"], rows=[m for m in MUST if m != "prefix"])

        long = filler(700, "explain")
        s = c.stream(dict(messages=[{"role": "user", "content": long}], temperature=0.9, top_p=0.95, seed=77, max_tokens=40,
                          frequency_penalty=0.4, presence_penalty=0.2, repetition_penalty=1.1, logit_bias={"300": -2.5},
                          ignore_eos=True, logprobs=True)).read()
        assert s.done and s.finish() == "length"
        rec = record_of(c, s.events[0]["id"])
        assert rec["choices"][0]["seed"] == "77" and rec["choices"][0]["finish"] == "length"
        is_what_was_sent(c, s, rec)
        assert len(rec["choices"][0]["output"]) == 40
        report = is_good(c, rec["id"])
        assert report["prompt_tokens"] > 512 and report["chunk_tokens"] == 100 and report["steps"] == 40
        info = {r["name"]: r for r in report["rows"] if not r["must_be_identical"]}
        assert {"index.fp8", "index.bf16", "kv.bf16"} <= set(info) and any(n.startswith("topk.") for n in info), info

        status, both = c.chat("Tell me something.", n=2, temperature=1, max_tokens=12)
        rec = record_of(c, both["id"])
        assert status == 200 and len(rec["choices"]) == 2 and len(rec["prompts"]) == 1
        is_good(c, both["id"], "--choice", "1", "--only", "again,handover", rows=["again", "handover"])

        # A name that is no row's runs nothing, and the verdict is of what ran.
        for only, word in (("bogus", "no row begins with 'bogus'; rows are: again, chunk, "), ("chunk,handovr", "'handovr'"),
                           ("chunk.8", "no row of this record begins with 'chunk.8'; rows are: again, chunk.")):
            status, none, err = explain(c, rec["id"], "--record-dir", folder_of(c), "--only", only)
            assert status == 2 and none is None and word in err, (only, status, err)
        report = is_good(c, rec["id"], "--only", "batch,topk", rows=["batch"])
        assert "(company) changes not one bit" in report["verdict"], report["verdict"]
        assert "not ruled out: the same again, chunks, hand-over, " in report["verdict"], report["verdict"]

        # Silent where nobody looks, unless asked to say what it does.
        for flags, said in (((), 0), (("--verbose",), 2)):
            status, _, err = explain(c, rec["id"], "--record-dir", folder_of(c), "--only", "again", *flags)
            assert status == 0 and err.count(" s\n") == said, (flags, err)
            assert ("[0/1] baseline: " in err and "[1/1] again: " in err) == (said == 2), err

        # What the client sent is not in any file, nor is its key.
        c.request("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "zebra-crossing"}], "max_tokens": 2},
                  {"Authorization": "Bearer " + secret})
        wait_for("four records", lambda: len([f for f in files(c) if f.endswith(".json")]) == 4)
        for name in files(c):
            with open(os.path.join(folder_of(c), name)) as f:
                text = f.read()
            assert secret not in text and "zebra" not in text and "Authorization" not in text
        assert c.metric("router_recorded_total") == 4 and c.metric("router_record_files") == 4
        c.wait_idle()

        # A record that was tampered with is told from the model's own answer, and other models are refused.
        rec = record_of(c, plain["id"])
        rec["choices"][0]["output"][3] ^= 1
        path = os.path.join(c.dir, "tampered.json")
        with open(path, "w") as f:
            json.dump(rec, f)
        status, report, _ = explain(c, path, "--only", "again")
        assert status == 1 and not report["good"] and report["failed"] == 0, report
        assert report["tokens"]["first_other_step"] == 3, report["tokens"]
        assert report["tokens"]["recorded"] == rec["choices"][0]["output"][3], report["tokens"]
        assert report["tokens"]["drawn_logit"] > report["tokens"]["recorded_logit"]
        for w in rec["workers"]:
            w["facts"]["model.fingerprint"] = "0123456789abcdef"
        with open(path, "w") as f:
            json.dump(rec, f)
        status, report, err = explain(c, path)
        assert status == 2 and report is None and "0123456789abcdef" in err, err
        status, _, err = explain(c, "chatcmpl-none", "--record-dir", folder_of(c))
        assert status == 2 and "no record" in err, err
        assert explain(c, plain["id"])[0] == 2  # where?
        status, _, err = explain(c, plain["id"], "--record-dir", folder_of(c), "--choice", "1")
        assert status == 2 and "the record has one choice, 0" in err, err


def test_a_resumed_stream(build):
    """The decode worker dies in mid-stream: the record says who went on from where, and the answer is still the model's."""
    with recording(build, decode=2) as c:
        c.decodes[0].kill()
        c.decodes[0].start("--fault", "send.TOKENS=12:kill")
        c.wait_ready()
        resumed = None
        for seed in range(6):  # until the one that dies has had the work
            s = c.stream(dict(messages=[{"role": "user", "content": filler(320, "resume%d" % seed)}], temperature=0.8, seed=seed,
                              max_tokens=30, ignore_eos=True, logprobs=True)).read()
            assert s.done and s.error is None, s.error
            rec = record_of(c, s.events[0]["id"])
            attempts = rec["choices"][0]["attempts"]
            if len(attempts) > 1 and attempts[-1]["first_output"] > 0:
                resumed = rec
                break
        assert resumed, "no stream was taken up elsewhere"
        is_what_was_sent(c, s, resumed)
        attempts = resumed["choices"][0]["attempts"]
        names = [resumed["workers"][a["decode"]]["name"] for a in attempts]
        assert names[0] == "d1" and names[-1] == "d2", names
        report = is_good(c, resumed["id"])
        assert "resume.%d" % attempts[-1]["first_output"] in [r["name"] for r in report["rows"]], report["rows"]


def ask(cluster, n, **more):
    for i in range(n):
        status, said = cluster.chat("Count to %d." % (i + 3), max_tokens=4, **more)
        assert status == 200, said
    return said["id"]


def test_records_are_bounded(build):
    """The oldest files go, also those of an earlier run; files have the mode asked for; others' files are left alone."""
    bounds = ["--record-max-requests", "3", "--record-mode", "0640"]
    with recording(build, bounds) as c:
        last = ask(c, 5)
        wait_for("five recorded", lambda: c.metric("router_recorded_total") == 5)
        kept = files(c)
        assert len(kept) == 3 and last + ".json" in kept, kept
        assert c.metric("router_record_removed_total") == 2 and c.metric("router_record_files") == 3
        assert os.stat(folder_of(c)).st_mode & 0o777 == 0o700
        for name in kept:
            assert os.stat(os.path.join(folder_of(c), name)).st_mode & 0o777 == 0o640, name
        assert c.metric("router_record_bytes") == sum(os.path.getsize(os.path.join(folder_of(c), n)) for n in kept)

        with open(os.path.join(folder_of(c), "notes.json"), "w") as f:
            f.write("not a record\n")
        with open(os.path.join(folder_of(c), ".cmpl-0.json.tmp"), "w") as f:
            f.write('{"towpath_record": 1, "id"')  # as a killed run leaves it
        size = os.path.getsize(os.path.join(folder_of(c), last + ".json"))
        c.router.kill()
        c.router.argv += ["--record-max-bytes", str(max(4096, 2 * size + size // 2))]
        c.router.start().wait_up()
        c.wait_ready()
        now = files(c)
        assert "notes.json" in now and ".cmpl-0.json.tmp" not in now and last + ".json" in now, now
        newest = ask(c, 3)
        wait_for("three recorded", lambda: c.metric("router_recorded_total") == 3)
        now = files(c)
        assert newest + ".json" in now and last + ".json" not in now and "notes.json" in now, now
        assert c.metric("router_record_bytes") <= max(4096, 2 * size + size // 2)

        # Without its folder nothing can be kept; requests go on.
        for name in os.listdir(folder_of(c)):
            os.unlink(os.path.join(folder_of(c), name))
        os.rmdir(folder_of(c))
        ask(c, 2)
        wait_for("two not recorded", lambda: c.metric("router_record_dropped_total", reason="failed") == 2)
        c.router.wait_log("the folder is gone")
        os.mkdir(folder_of(c), 0o700)
        again = ask(c, 2)
        wait_for("recording to go on", lambda: c.metric("router_recorded_total") == 5)
        assert again + ".json" in files(c) and c.metric("router_record_files") == 2
        c.wait_idle()


def test_off_means_off(build):
    with Cluster(build) as c:
        ask(c, 1)
        assert not os.path.exists(folder_of(c))
        assert not [name for name, _ in c.router.metrics() if "record" in name]


def test_wrong_settings(build):
    """Each ends the router at once with a line that says what would be right."""
    c = Cluster(build, start=False)

    def fails(pattern, *flags):
        c.router.argv = ["--model", harness.MODEL, "--control", c.control, "--http", "127.0.0.1:0"] + list(flags)
        c.router.start()
        assert c.router.wait() == 1, c.router.log()
        assert pattern in c.router.log(), (pattern, c.router.log())
    try:
        here = os.path.join(c.dir, "r")
        fails("everybody could write", "--record-dir", here, "--record-mode", "0666")
        fails("an octal mode from 0600 to 0664", "--record-dir", here, "--record-mode", "rw")
        fails("the owner must", "--record-dir", here, "--record-mode", "0400")
        with open(os.path.join(c.dir, "file"), "w") as f:
            f.write("x")
        fails("--record-dir", "--record-dir", os.path.join(c.dir, "file"))
        fails("cannot be made", "--record-dir", os.path.join(c.dir, "file", "below"))
        fails("cannot be made", "--record-dir", os.path.join(c.dir, "no", "such"))
        os.mkdir(os.path.join(c.dir, "open"))
        os.chmod(os.path.join(c.dir, "open"), 0o777)
        fails("everybody may write", "--record-dir", os.path.join(c.dir, "open"))
        os.chmod(os.path.join(c.dir, "open"), 0o775)
        fails("its group may write", "--record-dir", os.path.join(c.dir, "open"))
        fails("4K to", "--record-dir", here, "--record-max-bytes", "10")
    finally:
        c.close()
        c.folder.cleanup()


if __name__ == "__main__":
    harness.main([test_an_answer_is_the_models_own, test_a_resumed_stream, test_records_are_bounded, test_off_means_off,
                  test_wrong_settings], __doc__)
