#!/usr/bin/env python3
"""towpath-ctl status, drain and chat against a stub of the router that says exactly what a test wants.

usage: test_ctl.py BUILD_DIR
"""
import http.server
import json
import os
import pty
import re
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

from harness import SLACK

BUILD = os.path.abspath(sys.argv.pop(1) if len(sys.argv) > 1 else "build/release")
ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
BIN = os.path.join(BUILD, "bin")
CTL = os.path.join(BIN, "towpath-ctl")
MODEL = os.path.join(ROOT, "deploy", "demo-model")
ENV = {k: v for k, v in os.environ.items() if not k.startswith("TOWPATH_")}
WORKERS = [
    {"name": "prefill-0", "role": "prefill", "state": "serving", "load": {"queued": 3, "tokens_per_s": 812.5},
     "pairs": [{"name": "decode-0", "proof": "proved", "transport": "tcp/eth0", "method": "am", "mb_per_s": 1180,
                "latency_us": 41}, {"name": "decode-1\x1b[2J", "proof": "refuted", "why": "index_topk:\x1b '8' and '64'"}]},
    {"name": "decode-0", "role": "decode", "state": "serving", "load": {"running": 2}, "incarnation": "7f"},
]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.command, self.path, dict(self.headers), body))
        try:
            self.server.handle_call(self, self.command, self.path, body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True    # the client had seen enough

    do_GET = do_POST = answer

    def reply(self, status, value, headers=()):
        body = json.dumps(value).encode()
        self.send_response(status)
        for k, v in headers:
            self.send_header(k, v)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, value):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        data = f"data: {text}\n\n".encode()
        half = len(data) // 2
        self.chunk(data[:half])
        self.chunk(data[half:])

    def piece(self, finish=None, **delta):
        self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def end_stream(self, done=True):
        if done:
            self.event("[DONE]")
        self.chunk(b"")


def say(*pieces):
    """A chat handler that streams these pieces of content."""
    def handle(h, method, path, body):
        h.begin_stream()
        h.piece(role="assistant", content="")
        for p in pieces:
            h.piece(content=p)
        h.piece(finish="stop")
        h.event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": len(pieces)}})
        h.end_stream()
    return handle


class CtlTest(unittest.TestCase):
    def serve(self, handle):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.seen, server.handle_call = [], handle
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        self.addCleanup(lambda: (server.shutdown(), thread.join(), server.server_close()))
        self.server = server
        self.url = "http://127.0.0.1:%d" % self.server.server_address[1]

    def ctl(self, *args, env=None, **kw):
        kw.setdefault("stdin", subprocess.DEVNULL if "input" not in kw else None)
        if kw["stdin"] is None:
            del kw["stdin"]
        return subprocess.run([CTL, *args], env={**ENV, **(env or {})}, capture_output=True, timeout=60 * SLACK, **kw)

    def fails(self, r, *words):
        self.assertEqual(r.returncode, 2, r)
        text = r.stderr.decode()
        self.assertEqual(text.count("\n"), 1, text)
        for w in words:
            self.assertIn(w, text)

    # ---- chat
    def test_chat_sends_and_shows(self):
        self.serve(say("Hel", "lo ", "wörld"))
        r = self.ctl("chat", "--url", self.url, "--system", "Be \"brief\".", "--max-tokens", "9", "--temperature", "0",
                     "--thinking", "--stats", "Hi\nthere")
        self.assertEqual((r.returncode, r.stdout.decode()), (0, "Hello wörld\n"), r)
        self.assertRegex(r.stderr.decode(), r"^prompt 11 tokens, answer 3 tokens \(stop\); time to first token \d+\.\d+ s, "
                                            r"then [\d.]+ tokens/s\n$")
        method, path, headers, body = self.server.seen[0]
        self.assertEqual((method, path), ("POST", "/v1/chat/completions"))
        body = json.loads(body)
        self.assertEqual(body["messages"], [{"role": "system", "content": "Be \"brief\"."},
                                            {"role": "user", "content": "Hi\nthere"}])
        self.assertEqual((body["stream"], body["max_tokens"], body["temperature"]), (True, 9, 0))
        self.assertTrue(body["chat_template_kwargs"]["thinking"])
        self.assertNotIn("Authorization", headers)

    def test_chat_leaves_unsaid_what_was_not_given(self):
        self.serve(say("x"))
        self.assertEqual(self.ctl("chat", "--url", self.url, "q").returncode, 0)
        body = json.loads(self.server.seen[0][3])
        self.assertFalse({"max_tokens", "temperature", "model"} & set(body))

    def test_chat_shows_each_piece_at_once(self):
        go_on = threading.Event()

        def handle(h, method, path, body):
            h.begin_stream()
            h.piece(content="first")
            go_on.wait(50 * SLACK)
            h.piece(content=" second", finish="stop")
            h.end_stream()
        self.serve(handle)
        p = subprocess.Popen([CTL, "chat", "--url", self.url, "q"], env=ENV, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE)
        try:
            self.assertEqual(p.stdout.read(5), b"first")
            go_on.set()
            self.assertEqual(p.stdout.read(), b" second\n")
            self.assertEqual(p.wait(50 * SLACK), 0)
        finally:
            go_on.set()
            p.kill()
            p.stdout.close()
            p.wait()

    def test_chat_keeps_thoughts_off_stdout(self):
        def handle(h, method, path, body):
            h.begin_stream()
            h.piece(reasoning_content="Let me ")
            h.piece(reasoning_content="see.")
            h.piece(content="42", finish="stop")
            h.end_stream()
        self.serve(handle)
        r = self.ctl("chat", "--url", self.url, "--thinking", "q")
        self.assertEqual((r.returncode, r.stdout), (0, b"42\n"), r)
        self.assertEqual(r.stderr, b"[thinking]\nLet me see.\n[answer]\n")

    def test_chat_reads_stdin(self):
        self.serve(say("ok"))
        for args in ((), ("-",)):
            r = self.ctl("chat", "--url", self.url, *args, input=b"line 1\nline 2\n")
            self.assertEqual((r.returncode, r.stdout), (0, b"ok\n"), r)
            self.assertEqual(json.loads(self.server.seen[-1][3])["messages"][0]["content"], "line 1\nline 2")
        self.fails(self.ctl("chat", "--url", self.url, input=b""), "empty")
        self.fails(self.ctl("chat", "--url", self.url, input=b"a\xff"), "UTF-8", "byte 1")

    def test_conversation_keeps_what_was_said(self):
        calls = []

        def handle(h, method, path, body):
            calls.append(json.loads(body)["messages"])
            if len(calls) == 2:
                h.reply(429, {"error": {"message": "queue is full"}}, [("Retry-After", "4")])
            else:
                say(f"answer {len(calls)}")(h, method, path, body)
        self.serve(handle)
        ours, theirs = pty.openpty()
        try:
            p = subprocess.Popen([CTL, "chat", "--url", self.url], env=ENV, stdin=theirs, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE)
            os.write(ours, b"one\ntwo\nthree\n/quit\n")
            out, err = p.communicate(timeout=50 * SLACK)
        finally:
            os.close(ours)
            os.close(theirs)
        self.assertEqual((p.returncode, out), (0, b"answer 1\nanswer 3\n"), err)
        self.assertIn(b"429: queue is full; retry after 4 s", err)
        self.assertEqual([m["content"] for m in calls[2]], ["one", "answer 1", "three"])

    def test_chat_failures(self):
        def error_event(h, *_):
            h.begin_stream()
            h.piece(content="begun")
            h.event({"error": {"message": "decode worker lost"}})
            h.end_stream(done=False)

        def cut(h, *_):
            h.begin_stream()
            h.piece(content="begun")
            h.end_stream(done=False)

        def nonsense(h, *_):
            h.begin_stream()
            h.event("{not json")
            h.end_stream()
        for handle, words in ((error_event, ["decode worker lost"]), (cut, ["ended before"]), (nonsense, ["json"]),
                              (lambda h, *_: h.reply(200, {}), ["no event stream"]),
                              (lambda h, *_: h.reply(401, {"error": {"message": "a valid key is needed"}}),
                               ["401", "a valid key", "--api-key-file"]),
                              (lambda h, *_: h.reply(400, {"error": {"message": "bad\u001b[31m"}}), ["400", "bad\\x1b[31m"])):
            self.serve(handle)
            self.fails(self.ctl("chat", "--url", self.url, "q"), self.url, *words)

    def test_nobody_there(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            url = "http://127.0.0.1:%d" % s.getsockname()[1]
        for args in (("chat", "q"), ("status",), ("drain", "x")):
            self.fails(self.ctl(*args, "--url", url), url, "refused")
        self.fails(self.ctl("status", "--url", "https://x"), "--url", "http://")

    def test_silence_ends_with_the_timeout(self):
        gate = threading.Event()
        self.serve(lambda h, *_: gate.wait(50 * SLACK))
        self.addCleanup(gate.set)
        self.fails(self.ctl("status", "--url", self.url, "--timeout", "0.2"), "--timeout")
        gate.set()

    def test_key(self):
        self.serve(say("x"))
        with tempfile.TemporaryDirectory() as d:
            path = os.path.join(d, "key")
            with open(path, "w") as f:
                f.write("secret-1\nsecret-2\n")
            os.chmod(path, 0o600)
            self.assertEqual(self.ctl("chat", "--url", self.url, "--api-key-file", path, "q").returncode, 0)
            self.assertEqual(self.server.seen[0][2]["Authorization"], "Bearer secret-1")
            with open(path, "w") as f:
                f.write("two words\n")
            self.fails(self.ctl("chat", "--url", self.url, "--api-key-file", path, "q"), "--api-key-file")
            self.fails(self.ctl("chat", "--url", self.url, "--api-key-file", path + "x", "q"), "--api-key-file")

    # ---- status and drain
    def router(self, ready=200, workers=WORKERS, refused=None):
        def handle(h, method, path, body):
            if path == "/ready":
                h.reply(ready, {"status": "ready" if ready == 200 else "starting"})
            elif path == "/admin/workers":
                h.reply(200, workers)
            elif path == "/admin/refused" and refused is not None:
                h.reply(200, refused)
            else:
                h.reply(404, {"error": {"message": "there is no such path here"}})
        self.serve(handle)

    def test_status(self):
        self.router()
        r = self.ctl("status", "--url", self.url)
        lines = r.stdout.decode().splitlines()
        self.assertEqual((r.returncode, lines[0]), (0, f"{self.url}: ready, 2 workers"), r)
        self.assertEqual(lines[1].split(), ["name", "role", "state", "queued", "tokens_per_s", "running"])
        self.assertEqual(lines[2].split(), ["prefill-0", "prefill", "serving", "3", "812.5", "-"])
        self.assertEqual(lines[3].split(), ["decode-0", "decode", "serving", "-", "-", "2"])
        for column in ("role", "state", "running"):
            at = lines[1].index(column)
            self.assertTrue(all(line[at - 1] == " " and line[at] != " " for line in lines[2:4]), lines)
        self.assertEqual(lines[4], "pair prefill-0 -> decode-0: proved, tcp/eth0 by am, 1180 MB/s, 41 us")
        self.assertTrue(lines[5].startswith("pair prefill-0 -> decode-1") and lines[5].endswith(" '8' and '64'"), lines)
        self.assertIn(": refuted, index_topk:", lines[5])
        self.assertNotIn("\x1b", lines[5])
        self.assertEqual(len(lines), 6)
        r = self.ctl("status", "--url", self.url, "--all")
        self.assertEqual(r.stdout.decode().splitlines()[1].split(),
                         ["name", "role", "state", "load.queued", "load.tokens_per_s", "load.running", "incarnation"])
        r = self.ctl("status", "--json", env={"TOWPATH_URL": self.url})
        self.assertEqual((r.returncode, json.loads(r.stdout)),
                         (0, {"ready": True, "status": "ready", "workers": WORKERS}), r)

    def test_status_shows_who_is_refused(self):
        refused = [{"name": "d\x1b1", "role": "decode", "field": "join_token", "why": "join_token is none", "times": 3,
                    "last_ms": 12}]
        self.router(503, [], refused)
        r = self.ctl("status", "--url", self.url)
        lines = r.stdout.decode().splitlines()
        self.assertEqual((r.returncode, lines[0]), (1, f"{self.url}: starting, 0 workers"), r)
        self.assertTrue(lines[1].startswith("refused decode worker d") and
                        lines[1].endswith(": join_token is none (times: 3)") and "\x1b" not in lines[1], lines)
        r = self.ctl("status", "--url", self.url, "--json")
        self.assertEqual(json.loads(r.stdout)["refused"], refused)

    def test_status_while_starting(self):
        self.router(503, [])
        r = self.ctl("status", "--url", self.url)
        self.assertEqual((r.returncode, r.stdout.decode()), (1, f"{self.url}: starting, 0 workers\n"), r)

    def test_drain_waits_until_gone(self):
        state = {"asked": 0, "drained": None}

        def handle(h, method, path, body):
            if method == "POST":
                state["drained"] = path
                h.reply(202, {"state": "draining"})
                return
            left = [dict(w) for w in WORKERS]
            if state["drained"]:
                state["asked"] += 1
                left[1]["state"] = "draining"
                if state["asked"] > 1:
                    del left[1]
            h.reply(200, left)
        self.serve(handle)
        r = self.ctl("drain", "--url", self.url, "decode-0")
        self.assertEqual(r.returncode, 0, r)
        self.assertEqual(state["drained"], "/admin/workers/decode-0/drain")
        self.assertRegex(r.stdout.decode(), r"^decode-0: draining\ndecode-0: gone after [\d.]+ s\n$")

    def test_drain_of_a_worker_that_was_started_again(self):
        state = {"drained": False}

        def handle(h, method, path, body):
            if method == "POST":
                state["drained"] = True
                h.reply(202, {})
            else:
                h.reply(200, [{**WORKERS[1], "incarnation": "80" if state["drained"] else "7f"}])
        self.serve(handle)
        self.assertEqual(self.ctl("drain", "--url", self.url, "decode-0").returncode, 0)

    def test_drain_failures(self):
        def handle(h, method, path, body):
            if method == "POST" and "nobody" in path:
                h.reply(404, {"error": {"message": "no worker of that name"}})
            else:
                h.reply(200, WORKERS)
        self.serve(handle)
        self.fails(self.ctl("drain", "--url", self.url, "nobody/a b"), "404", "no worker of that name")
        self.assertEqual(self.server.seen[-1][1], "/admin/workers/nobody%2Fa%20b/drain")
        self.fails(self.ctl("drain", "--url", self.url), "NAME")
        r = self.ctl("drain", "--url", self.url, "--max-wait", "0.1", "decode-0")
        self.assertEqual(r.returncode, 1)
        self.assertIn(b"--max-wait", r.stderr)

    # ---- settings
    def test_exit_status_is_one_convention(self):
        """2 with one line: it could not be done or asked (test_status_while_starting, test_drain_failures: 1, no)."""
        for command in ("eval", "explain", "numerics", "status", "drain", "chat", "verify", "needle"):
            self.fails(self.ctl(command, "--no-such-flag"), "--no-such-flag")
        for command in (["status"], ["drain", "x"], ["chat", "q"], ["verify"]):
            self.fails(self.ctl(*command, "--url", "http://127.0.0.1:1"), "127.0.0.1:1")
        self.fails(self.ctl("status", "--url", "http://127.0.0.1:1/a\nb\tc"), "/a\\x0ab\\x09c")  # one line all the same
        self.router()
        for command in (["status", "--url", self.url], ["status", "--json", "--url", self.url], ["help"], ["--version"],
                        ["status", "--help"]):  # what was asked for did not reach whoever asked
            with open("/dev/full", "w") as full:
                r = subprocess.run([CTL, *command], env=ENV, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE)
            self.fails(r, "standard output cannot be written")
        r = subprocess.run(["sh", "-c", 'ulimit -s 64; exec "$@"', "sh", CTL, "eval", "--model", MODEL, "--tokens", "x", "--out", "y"],
                           env=ENV, capture_output=True)
        self.fails(r, "stacks of 64 KiB: at least 256 KiB")  # the engine needs more
        self.fails(self.ctl("needle", "--url", self.url, "--out", "/dev/full"), "--out /dev/full: not a regular file")
        r = self.ctl("no-such-command")
        self.assertEqual((r.returncode, r.stdout), (2, b""))

    def test_version(self):
        lines = {self.ctl("--version").stdout, self.ctl("status", "--version").stdout.replace(b" status", b"")}
        for program in ("router", "prefill", "decode"):
            r = subprocess.run([os.path.join(BIN, "towpath-" + program), "--version"], env=ENV, stdout=subprocess.PIPE)
            self.assertEqual(r.returncode, 0)
            lines.add(r.stdout.replace(program.encode(), b"ctl"))
        self.assertEqual(len(lines), 1, lines)
        self.assertRegex(lines.pop().decode(), r"^towpath-ctl \d+\.\d+\.\d+ \(CUDA (yes|no), systemd (yes|no)\)\n$")

    def test_every_flag_is_known_to_the_others(self):
        with open(os.path.join(ROOT, "common", "base", "opt.c")) as f:
            text = f.read().split("settings_of_all[] =")[1].split(";")[0]
        names = set(text.replace('"', " ").split())
        used = set()
        for program in ("router", "prefill", "decode"):
            r = subprocess.run([os.path.join(BIN, "towpath-" + program), "--help"], env=ENV, stdout=subprocess.PIPE)
            self.assertEqual(r.returncode, 0)
            used |= set(re.findall(r"^\s+--([a-z0-9-]+)", r.stdout.decode(), re.M))
        for command in ("eval", "numerics", "status", "drain", "chat"):
            r = self.ctl(command, "--help")
            self.assertEqual(r.returncode, 0)
            used |= set(re.findall(r"^\s+--([a-z0-9-]+)", r.stdout.decode(), re.M))
        self.assertEqual(used - {"config", "check-config", "version", "help"}, names)

    def test_variables(self):
        self.router()
        self.assertEqual(self.ctl("status", "--url", self.url, env={"TOWPATH_MODEL": "/x"}).returncode, 0)
        for program in ("router", "prefill", "decode"):
            def check(variable, value):
                return subprocess.run([os.path.join(BIN, "towpath-" + program), "--check-config", "--model", MODEL],
                                      env=dict(ENV, **{variable: value}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            r = check("TOWPATH_URL", self.url)
            self.assertEqual(r.returncode, 0, r.stdout)
            r = check("TOWPATH_URLS", self.url)
            self.assertNotEqual(r.returncode, 0)
            self.assertIn(b"TOWPATH_URLS", r.stdout)
        self.fails(self.ctl("status", "--url", self.url, env={"TOWPATH_NONSENSE": "1"}), "TOWPATH_NONSENSE")
        self.fails(self.ctl("status", env={"TOWPATH_TIMEOUT": "0"}), "TOWPATH_TIMEOUT")
        for program in ("router", "prefill", "decode", "ctl"):  # whatever the environment says
            for args in (["--help"], ["--version"]) + ((["status", "--help"],) if program == "ctl" else ()):
                r = subprocess.run([os.path.join(BIN, "towpath-" + program), *args], env=dict(ENV, TOWPATH_NONSENSE="1"),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                self.assertEqual((r.returncode, r.stderr, bool(r.stdout)), (0, b"", True), (program, args))
        self.assertEqual(self.ctl("chat", "--check-config").returncode, 0)
        self.fails(self.ctl("chat", "--check-config", "--url", "x"), "--url")


if __name__ == "__main__":
    unittest.main()
