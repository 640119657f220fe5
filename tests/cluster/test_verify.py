#!/usr/bin/env python3
"""towpath-ctl verify and needle: against a cluster with the demo model, in one process, and against a stub that
forgets, refuses captures or is full for a moment.
usage: test_verify.py BUILD_DIR"""
import contextlib
import http.server
import json
import os
import re
import subprocess
import tempfile
import threading
import xml.dom.minidom

import harness
from harness import Cluster, MODEL, ROOT, SLACK

ENV = {k: v for k, v in os.environ.items() if not k.startswith("TOWPATH_")}


def ctl(build, *args, timeout=120):
    return subprocess.run([os.path.join(ROOT, build, "bin", "towpath-ctl"), *args], env=ENV, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=timeout * SLACK)


def test_verify_and_sweep_a_cluster(build):
    with Cluster(build, router=["--index-capture"]) as c, tempfile.TemporaryDirectory() as d:
        url = ["--url", "http://127.0.0.1:%d" % c.port]
        r = ctl(build, "verify", *url, "--capture", "--shadow", "bf16,fp8", "--json")
        assert r.returncode == 0, r
        report = json.loads(r.stdout)
        assert report["pass"] and [x["check"] for x in report["checks"]] == ["tools", "secret", "structured"], report
        assert report["checks"][2]["prompt_tokens"] == 8192 and report["checks"][0]["requests"] == 4, report
        for x in report["checks"]:
            assert x["finish_reason"] == "stop" and x["expected"] in x["answer"] and "note" not in x, x
            assert x["verdict"] == "selected" and 1 <= x["rank"] <= x["rank_topk"] == 64, x
            assert sorted(x["shadow"]) == ["bf16", "fp8"] and [l for l, _ in x["layers"]] == [2, 4, 6], x

        out, svg = d + "/out.jsonl", d + "/map.svg"
        sweep = ["needle", *url, "--lengths", "300,1K", "--depths", "0,60", "--fillers", "config,logs", "--topk", "8,default",
                 "--shadow", "bf16", "--concurrency", "3", "--out", out]
        r = ctl(build, *sweep, "--json", "--svg", svg)
        assert r.returncode in (0, 1), r
        report = json.loads(r.stdout)
        cells = report["cells"]
        assert len(cells) == 16 and len(report["panels"]) == 8, report
        assert r.returncode == (0 if all(x["found"] for x in cells) else 1), r
        assert r.stderr.count("\n") == 16 and "[16/16] " in r.stderr, r.stderr
        for x in cells:
            assert x["prompt_tokens"] == x["length"] and x["keys"] == "own" and "verdict" in x, x
            assert x["rank_topk"] == (x["topk"] or 64) and x["found"] == (x["expected"] in x["answer"]), x
        assert sum(x["found"] for x in cells) >= 15, cells
        xml.dom.minidom.parse(svg)

        # half a line of a cell that was cut off: that one is run again, and no other
        with open(out) as f:
            lines = f.read().splitlines(keepends=True)
        with open(out, "w") as f:
            f.writelines(lines[:15] + [lines[15][:40]])
        r = ctl(build, *sweep, "--resume")
        assert r.stderr.count("\n") == 1 and "[16/16] " in r.stderr, r.stderr
        with open(out) as f:
            again = [json.loads(l) for l in f]
        same = [{k: v for k, v in x.items() if k != "seconds"} for x in again]
        assert same[15] == {k: v for k, v in json.loads(lines[15]).items() if k != "seconds"}, (same[15], lines[15])
        assert "found %d of 16" % sum(x["found"] for x in again) in r.stdout, r.stdout

        # one cell alone: the same prompt in the cluster and in one process, and the same result
        served = ctl(build, "needle", *url, "--cell", "1024,60,logs,0,own,8", "--json")
        alone = ctl(build, "needle", "--in-process", "--model", MODEL, "--cell", "1024,60,logs,0,fp4,8", "--json")
        assert served.returncode == alone.returncode in (0, 1), (served, alone)
        served, alone = json.loads(served.stdout), json.loads(alone.stdout)
        assert served["prompt"] == alone["prompt"] and served["prompt"].count(served["result"]["expected"]) == 1
        for key in ("answer", "finish_reason", "verdict_text", "layers", "prompt_tokens"):
            assert served["result"][key] == alone["result"][key], (key, served["result"], alone["result"])
        c.wait_idle()


# ---- a stub -------------------------------------------------------------------------------------------

class Stub(http.server.BaseHTTPRequestHandler):
    """Counts a token a word. Answers with self.server.answer(request)."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        status = self.server.ready.pop(0) if len(self.server.ready) > 1 else self.server.ready[0]
        data = json.dumps({"status": "ready" if status == 200 else "starting"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, value, headers = 200, None, {}
        if self.path == "/tokenize":
            value = {"count": sum(len(m["content"].split()) for m in body["messages"]), "max_model_len": 16384}
        else:
            self.server.seen.append(body)
            status, value, headers = self.server.answer(body)
        data = json.dumps(value).encode()
        self.send_response(status)
        for k, v in dict(headers, **{"Content-Length": str(len(data)), "Content-Type": "application/json"}).items():
            self.send_header(k, v)
        self.end_headers()
        self.wfile.write(data)


def said(text, finish="stop", **message):
    return 200, {"choices": [{"index": 0, "message": dict(role="assistant", content=text, **message), "finish_reason": finish}],
                 "usage": {"prompt_tokens": 7, "completion_tokens": 3}}, {}


@contextlib.contextmanager
def stub(answer):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.answer, server.seen, server.ready = answer, [], [200]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server, ["--url", "http://127.0.0.1:%d" % server.server_address[1]]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def knows(body):
    """A perfect model of the three checks and of every needle."""
    text = " ".join(m.get("content") or "" for m in body["messages"])
    last = body["messages"][-1]
    if last["role"] == "tool":
        return said("It says: " + last["content"])
    for question, name, arguments in (("weather in Lisbon", "get_weather", {"location": "Lisbon"}),
                                      ("time is it in Oslo", "get_time", {"city": "Oslo"})):
        if question in last["content"]:
            assert [t["function"]["name"] for t in body["tools"]] == ["get_weather", "get_time"]
            return said("", "tool_calls", tool_calls=[{"id": "call_1", "type": "function", "function": {
                "name": name, "arguments": json.dumps(arguments)}}])
    if "my access token is " in text:
        return said(re.search(r"my access token is (\S+)\.", text).group(1))
    service = re.search(r"What is the deploy token of (\S+) in production\?$", text).group(1)
    spelled = "|".join(re.escape(s) for s in (service, service.replace("-", "_"), service.upper().replace("-", "_")))
    # the first thing after the service's name that looks like a value
    at = re.search("(?:%s)(?:_DEPLOY_TOKEN=|[^?]*?deploy_token\\W*?(?: is | = |: |': )[\"']?|[^?]*?\\| --- \\|\n\\|[^|]*\\|[^|]*\\| )"
                   "([\\w-]+)" % spelled, text, re.S) or re.search("(?:%s) in production is ([\\w-]+)" % spelled, text)
    return said(at.group(1) if at else "?")


def test_exit_statuses(build):
    for answer, status, words in ((knows, 0, "3 of 3 checks passed"), (lambda b: said("I do not know."), 1, "FAIL"),
                                  (lambda b: knows(b)[:1] + said(knows(b)[1]["choices"][0]["message"]["content"], "length")[1:]
                                   if b["messages"][-1]["content"].startswith("What is my") else knows(b), 1,
                                   "finish reason length, not stop")):
        with stub(answer) as (server, url):
            r = ctl(build, "verify", *url, "--length", "500")
            assert r.returncode == status and words in r.stdout, r
    with stub(lambda b: (500, {"error": {"message": "broken"}}, {})) as (server, url):
        r = ctl(build, "verify", *url)
        assert r.returncode == 2 and r.stderr == "towpath-ctl verify: check tools could not be made\n", r
        assert "tools      not made: " in r.stdout and "broken" in r.stdout and "0 of 3 checks passed, 1 could not be made, 2 not run" in r.stdout, r
        r = ctl(build, "needle", *url, "--lengths", "200", "--concurrency", "4")
        assert r.returncode == 2 and "500: broken" in r.stderr and "cell 200," in r.stderr, r


def test_a_router_that_is_not_ready(build):
    """It is waited for, which is said; for --ready-wait at most, and then no request was sent."""
    with stub(knows) as (server, url):
        server.ready = [503, 503, 200]
        r = ctl(build, "verify", *url, "--length", "500")
        assert r.returncode == 0 and "is not ready (starting); waiting for it, 60 s at most" in r.stderr, r
        server.ready, n = [503], len(server.seen)
        r = ctl(build, "verify", *url, "--length", "500", "--ready-wait", "0.1")
        assert r.returncode == 2 and "not ready after 0.1 s (--ready-wait): starting" in r.stderr, r
        assert len(server.seen) == n and "0 of 3 checks passed" in r.stdout, r


def test_checks_before_one_that_cannot_be_made_are_reported(build):
    """The server breaks down in the second check, or in the middle of the first."""
    def until(n):
        seen = []

        def answer(body):
            seen.append(body)
            return knows(body) if len(seen) <= n else (500, {"error": {"message": "broken"}}, {})
        return answer
    with stub(until(4)) as (server, url):
        r = ctl(build, "verify", *url, "--length", "500")
        lines = r.stdout.split("\n")
        assert r.returncode == 2 and "check secret could not be made" in r.stderr and "broken" not in r.stderr, r
        assert lines[0].startswith("PASS  tools ") and "14:35" in lines[0], r
        assert lines[1].startswith("----  secret     not made: ") and "broken" in lines[1], r
        assert lines[2].strip() == "----  structured not run", r
        assert lines[3] == "1 of 3 checks passed, 1 could not be made, 1 not run", r
    for n, states in (4, ["passed", "not_made", "not_run"]), (2, ["not_made", "not_run", "not_run"]):
        with stub(until(n)) as (server, url):
            r = ctl(build, "verify", *url, "--length", "500", "--json")
            report = json.loads(r.stdout)
            checks = report["checks"]
            assert r.returncode == 2 and report["pass"] is False, r
            assert [x["state"] for x in checks] == states, r
            assert [x["pass"] for x in checks] == [{"passed": True}.get(s) for s in states], r
            assert "broken" in checks[states.index("not_made")]["why"] and "answer" not in checks[-1], r


def test_needle_counts_what_is_found(build):
    for answer, status, words in ((knows, 0, "found 15 of 15"), (lambda b: said("nothing"), 1, "found 0 of 15")):
        with stub(answer) as (server, url):
            r = ctl(build, "needle", *url, "--lengths", "100,200,300", "--fillers", "prose", "--concurrency", "2")
            assert r.returncode == status and words in r.stdout, r
            assert len(server.seen) == 15 and all(b["temperature"] == 0 and "index_topk" not in b for b in server.seen)


def test_server_without_captures(build):
    def answer(body):
        if "index_capture" in body:
            return 400, {"error": {"message": "index_capture: is not enabled", "code": "index_capture_disabled"}}, {}
        return knows(body)
    with stub(answer) as (server, url):
        r = ctl(build, "verify", *url, "--length", "500", "--capture")
        assert r.returncode == 0 and r.stdout.count("no capture: ") == 3, r  # the checks passed; that is what was asked
        assert r.stdout.endswith("3 of 3 checks passed; of 3 no capture could be made\n"), r
        sent = len(server.seen)
        r = ctl(build, "verify", *url, "--shadow", "fp8")
        assert r.returncode == 2 and "--shadow fp8" in r.stderr and "--capture" in r.stderr and len(server.seen) == sent, r
        grid = ["--lengths", "200", "--depths", "0,50", "--fillers", "prose"]
        r = ctl(build, "needle", *url, *grid)
        assert r.returncode == 0 and r.stderr.count("no ranks: ") == 1 and "rank 1" not in r.stdout, r
        r = ctl(build, "needle", *url, *grid, "--capture", "on")
        assert r.returncode == 2 and "not enabled" in r.stderr, r


def test_a_file_that_cannot_be_written_is_known_before_the_work(build):
    """Nothing is computed or asked for a report that has nowhere to go, and what is there is kept until there is another."""
    with stub(knows) as (server, url), tempfile.TemporaryDirectory() as d:
        nowhere = d + "/no/such"
        for flag, status, command in (("--svg", 2, ["needle", *url]), ("--out", 2, ["needle", *url]), ("--out", 2, ["needle", *url, "--resume"]),
                                      ("--report", 2, ["numerics", "--model", MODEL]),
                                      ("--out", 2, ["eval", "--model", MODEL, "--tokens", d + "/none"])):
            r = ctl(build, *command, flag, nowhere)
            assert r.returncode == status and "%s %s: No such file or directory" % (flag, nowhere) in r.stderr, r
            assert r.stdout == "" and r.stderr.count("\n") == 1 and not server.seen and os.listdir(d) == [], r
        with open(d + "/old.svg", "w") as f:
            f.write("old")
        for flag in ("--svg", "--out"):
            r = ctl(build, "needle", *url, "--cell", "200,50,prose,0,own,default", flag, d + "/old.svg")
            assert r.returncode == 2 and flag in r.stderr and "--cell" in r.stderr and not server.seen, r
    with stub(lambda b: (500, {"error": {"message": "broken"}}, {})) as (server, url), tempfile.TemporaryDirectory() as d:
        with open(d + "/old.svg", "w") as f:
            f.write("old")
        r = ctl(build, "needle", *url, "--lengths", "200", "--svg", d + "/old.svg")
        with open(d + "/old.svg") as f:
            assert r.returncode == 2 and f.read() == "old", r


def test_full_server_is_asked_again(build):
    refused = []

    def answer(body):
        if not refused:
            refused.append(body)
            return 429, {"error": {"message": "full"}}, {"Retry-After": "1"}
        return knows(body)
    with stub(answer) as (server, url):
        r = ctl(build, "needle", *url, "--lengths", "200", "--depths", "50", "--fillers", "prose")
        assert r.returncode == 0 and len(server.seen) == 2, r


if __name__ == "__main__":
    harness.main([test_exit_statuses, test_a_router_that_is_not_ready, test_checks_before_one_that_cannot_be_made_are_reported, test_needle_counts_what_is_found, test_server_without_captures,
                  test_a_file_that_cannot_be_written_is_known_before_the_work,
                  test_full_server_is_asked_again, test_verify_and_sweep_a_cluster], __doc__)
