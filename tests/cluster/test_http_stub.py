#!/usr/bin/env python3
"""The router's client-facing half over a stub back end (stub_router.c): framing, limits, streams, client
behaviour and the openai client. usage: test_http_stub.py BUILD_DIR"""
import http.client
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

from harness import SLACK

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build/release"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOKENIZER = os.path.join(ROOT, "deploy/demo-model/tokenizer.json")


def wait_for(what, fn, seconds=20.0):
    """Polls until fn() is true; how long it took, or an error."""
    start = time.monotonic()
    while time.monotonic() - start < seconds * SLACK:
        if fn():
            return time.monotonic() - start
        time.sleep(0.01)
    raise AssertionError("not within %.1f s: %s" % (seconds * SLACK, what))


class Stub:
    def __init__(self, *options):
        self.dir = tempfile.TemporaryDirectory()
        port_file = os.path.join(self.dir.name, "port")
        self.log = open(os.path.join(self.dir.name, "log"), "w+")
        self.process = subprocess.Popen(
            [os.path.join(ROOT, BUILD, "test/cluster/stub_router"), TOKENIZER, port_file, *options],
            stderr=self.log)
        wait_for("port file", lambda: self.process.poll() is not None or
                 (os.path.exists(port_file) and open(port_file).read().endswith("\n")), 20)
        assert self.process.poll() is None, "stub_router did not start"
        self.port = int(open(port_file).read())

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        rc = self.process.wait(20 * SLACK)
        self.log.seek(0)
        text = self.log.read()
        if rc != 0 or "ERROR" in text:
            print(text[-3000:], file=sys.stderr)
        self.log.close()
        self.dir.cleanup()
        if exc[0] is None:
            assert rc == 0, "stub_router ended with %d" % rc

    def connect(self):
        s = socket.create_connection(("127.0.0.1", self.port))
        s.settimeout(30 * SLACK)
        return s

    def raw(self, data):
        """Sends data, closes nothing, returns all until the server closes or is done answering."""
        with self.connect() as s:
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            return read_all(s)

    def request(self, method, path, body=None, headers=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60 * SLACK)
        if body is not None and not isinstance(body, (str, bytes)):
            body = json.dumps(body)
        c.request(method, path, body, headers or {})
        r = c.getresponse()
        data = r.read()
        c.close()
        return r, data

    def post(self, path, **body):
        r, data = self.request("POST", path, body)
        return r.status, json.loads(data)

    def metric(self, name):
        _, data = self.request("GET", "/metrics")
        found = re.search(r"^towpath_%s(?:\{[^}]*\})? (\S+)$" % re.escape(name), data.decode(), re.M)
        return float(found.group(1)) if found else None

    def descriptors(self):
        return len(os.listdir("/proc/%d/fd" % self.process.pid))


def read_all(s):
    data = b""
    while True:
        try:
            got = s.recv(65536)
        except ConnectionResetError:
            return data
        if not got:
            return data
        data += got


def post_bytes(path, body, extra=b""):
    body = json.dumps(body).encode() if not isinstance(body, bytes) else body
    return (b"POST " + path.encode() + b" HTTP/1.1\r\nHost: x\r\n" + extra +
            b"Content-Length: %d\r\n\r\n" % len(body) + body)


def statuses(data):
    return [int(s) for s in re.findall(rb"HTTP/1\.1 (\d{3})", data) if s != b"100"]


def events(data):
    """The JSON of a stream's data lines; '[DONE]' as that string; comments left out."""
    out = []
    for block in data.decode().split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: "):
                out.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
            else:
                assert line == "" or line.startswith(":"), line
    return out


def stream(stub, path, **body):
    r, data = stub.request("POST", path, dict(body, stream=True))
    assert r.status == 200, (r.status, data)
    assert r.getheader("Content-Type").startswith("text/event-stream")
    return events(data)


def chat(content, **more):
    return dict(more, messages=[{"role": "user", "content": content}])


def joined(chunks, index=0):
    """What a client makes of a chat stream: content, reasoning, finish, calls."""
    content = reasoning = ""
    calls, finish = {}, None
    for c in chunks:
        if c == "[DONE]":
            continue
        for ch in c["choices"]:
            if ch["index"] != index:
                continue
            d = ch["delta"]
            content += d.get("content") or ""
            reasoning += d.get("reasoning_content") or ""
            for t in d.get("tool_calls", []):
                got = calls.setdefault(t["index"], {"name": "", "arguments": "", "id": t.get("id")})
                got["name"] += t["function"].get("name") or ""
                got["arguments"] += t["function"].get("arguments") or ""
            if ch["finish_reason"] is not None:
                assert finish is None, "two finish reasons"
                finish = ch["finish_reason"]
    return content, reasoning, finish, [calls[k] for k in sorted(calls)]


# ---- tests --------------------------------------------------------------------------------------

def test_framing(stub):
    def bad(data, *want):
        got = statuses(stub.raw(data))
        assert len(got) == 1 and got[0] in want, (data, got)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    inner = b"GET /admin/workers HTTP/1.1\r\nHost: x\r\n\r\n"
    bad(head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner, 400)
    bad(head + b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n" + inner, 400)
    bad(head + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n" + inner, 400)
    bad(head + b"Transfer-Encoding: xchunked\r\n\r\n" + inner, 501)
    bad(b"GET /health HTTP/1.1\r\n\r\n" + inner, 400)
    bad(b"GET /health HTTP/1.1\r\nHost: x\r\n y\r\n\r\n" + inner, 400)
    bad(head + b"Transfer-Encoding: chunked\r\n\r\n00000000000000001\r\nx\r\n0\r\n\r\n" + inner, 400)
    bad(b"GET /" + b"a" * 40000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414)
    bad(b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40000 + b"\r\n\r\n", 431)
    bad(head + b"Content-Length: 99999999999\r\n\r\n", 413)
    # A body that is a request does not run.
    got = statuses(stub.raw(head + b"Content-Length: %d\r\n\r\n" % len(inner) + inner))
    assert got == [400], got


def test_pipelining_at_every_split(stub):
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    two = post_bytes("/tokenize", {"prompt": "hi"})
    three = b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n"
    data = one + two + three
    for cut in range(0, len(data), 3):
        with stub.connect() as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            s.sendall(data[:cut])
            s.sendall(data[cut:])
            s.shutdown(socket.SHUT_WR)
            got = read_all(s)
        assert statuses(got) == [200, 200, 404], (cut, got)
        assert got.index(b'"ok"') < got.index(b'"tokens"')


def test_methods_paths_keys(stub):
    r, data = stub.request("GET", "/v1/chat/completions")
    assert r.status == 405 and r.getheader("Allow") == "POST"
    r, data = stub.request("DELETE", "/v1/models")
    assert r.status == 405 and "GET" in r.getheader("Allow")
    r, data = stub.request("HEAD", "/health")
    assert r.status == 200 and data == b""
    r, data = stub.request("GET", "/x")
    assert r.status == 404 and json.loads(data)["error"]["code"] == "not_found"
    assert stub.request("POST", "/admin/workers/stub/drain")[0].status == 202
    assert stub.request("POST", "/admin/workers/no%20one/drain")[0].status == 404
    r, data = stub.request("GET", "/admin/workers")
    assert json.loads(data)[0]["name"] == "stub"
    with tempfile.NamedTemporaryFile("w") as f:
        f.write("first-key\r\n\n" + "k" * 512 + "\r\nsecond \n")
        f.flush()
        with Stub("keys=" + f.name, "served=m") as keyed:
            for path in ("/v1/models", "/admin/workers", "/x"):
                assert keyed.request("GET", path)[0].status == 401, path
            for path in ("/health", "/ready", "/metrics"):
                assert keyed.request("GET", path)[0].status == 200, path
            for key, want in (("second", 200), ("secon", 401), ("second2", 401), ("", 401), ("k" * 512, 200),
                              ("k" * 511, 401)):
                r, data = keyed.request("GET", "/v1/models", None, {"Authorization": "Bearer " + key})
                assert r.status == want, (key, r.status)
            r, data = keyed.request("POST", "/v1/completions", {"model": "other", "prompt": "x"},
                                    {"Authorization": "Bearer first-key"})
            assert r.status == 404 and json.loads(data)["error"]["param"] == "model"


def test_validation(stub):
    cases = [
        ("temperature", -1), ("temperature", 2.1), ("temperature", "1"), ("top_p", 1.1),
        ("top_p", True), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**31),
        ("max_tokens", 1.5), ("max_tokens", "5"), ("n", 0), ("n", 129), ("n", 1.0),
        ("seed", "a"), ("presence_penalty", 3), ("frequency_penalty", -2.5), ("top_k", -2),
        ("min_p", 2), ("stream", "true"), ("stream", 1), ("stop", ""), ("stop", [""]),
        ("stop", ["a"] * 17), ("stop", 5), ("stop", ["a", None]), ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}), ("logit_bias", {"999999": 1}), ("logit_bias", []),
        ("ignore_eos", "no"), ("index_topk", 0), ("index_topk", 5000), ("index_capture", {}),
        ("stream_options", {"include_usage": True}), ("user", 5), ("model", 5), ("model", "m" * 201),
    ]
    for path, base in (("/v1/chat/completions", chat("x")), ("/v1/completions", {"prompt": "x"})):
        for key, value in cases:
            for streamed in (False, True):
                if streamed and key in ("stream", "stream_options"):
                    continue
                body = dict(base, **{key: value})
                if streamed:
                    body["stream"] = True
                r, data = stub.request("POST", path, body)
                assert r.status == 400, (path, key, value, data)
                assert r.getheader("Content-Type") == "application/json"
                e = json.loads(data)["error"]
                assert e["type"] and e["code"] and key in (e["param"] or ""), (key, value, e)
                assert key in e["message"], (key, e)
    for extra in ({"top_logprobs": 3}, {"logprobs": 1}, {"logprobs": True, "top_logprobs": 21},
                  {"tool_choice": "sometimes"}, {"tool_choice": "required"}, {"tools": [{}]},
                  {"tools": [{"type": "function", "function": {"name": "a b"}}]},
                  {"reasoning_effort": "extreme"}, {"response_format": {"type": "xml"}},
                  {"max_tokens": 5, "max_completion_tokens": 6}, {"messages": []},
                  {"messages": "hi"}, {"messages": [{"role": "king", "content": "x"}]},
                  {"messages": [{"role": "user", "content": 5}]}):
        status, body = stub.post("/v1/chat/completions", **dict(chat("x"), **extra))
        assert status == 400 and body["error"]["param"], (extra, body)
    inner = {"messages": [{"role": "king", "content": "x"}]}, {"thinking": {"type": 5}}, {"chat_template_kwargs": {"thinking": 5}}
    for extra, field in zip(inner, ("messages[0].role", "thinking.type", "chat_template_kwargs.thinking")):
        status, body = stub.post("/v1/chat/completions", **dict(chat("x"), **extra))
        assert status == 400 and body["error"]["param"] == field, body
        assert body["error"]["message"].startswith(field + ": must be "), body
    for extra in ({"prompt": []}, {"prompt": ""}, {"prompt": 5}, {"prompt": [5, "x"]},
                  {"prompt": [-1]}, {"prompt": [2**31 - 1]}, {"prompt": [2560]}, {"prompt": None},
                  {"logprobs": 21}, {"logprobs": True}, {"best_of": 2}, {"suffix": "x"}):
        status, body = stub.post("/v1/completions", **dict({"prompt": "x"}, **extra))
        assert status == 400 and body["error"]["param"], (extra, body)
    # null is the default, unknown fields are ignored
    nulls = {k: None for k in ("temperature", "max_tokens", "n", "seed", "stop", "stream", "logit_bias",
                               "stream_options", "user", "logprobs", "index_capture", "tools")}
    status, body = stub.post("/v1/chat/completions", **chat("x", **nulls, no_such_field={"a": [1]}))
    assert status == 200, body


def test_refusals_below_the_handler(stub):
    """Framing, limits, paths and keys: the answer names what was wrong, what was sent and what is right."""
    with Stub("max_body=1000") as small:
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
        for data, status, parts in (
                (head + b"Content-Length: 2000\r\n\r\n", 413, ("1000 bytes", "is 2000")),
                (head + b"Transfer-Encoding: chunked\r\n\r\n7d0\r\n", 413, ("1000 bytes", "2000")),
                (head + b"X-Long: " + b"a" * 40000, 431, ("32768 bytes", "X-Long")),
                (head + b"a: b\r\n" * 200, 431, ("100 lines", "101")),
                (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, ("8192", "9001", "/aaa")),
                (head + b'Content-Length: "5"\r\n\r\n', 400, ("Content-Length", "5", "decimal digits")),
                (b"GET /no\\such HTTP/1.1\r\nHost: x\r\n\r\n", 404, ("path", "/no")),
                (b"DELETE /health HTTP/1.1\r\nHost: x\r\n\r\n", 405, ("method", "GET", "DELETE")),
                (b"GET /v1/models/none HTTP/1.1\r\nHost: x\r\n\r\n", 404, ("model", "none")),
                (b"POST /admin/workers/none/drain HTTP/1.1\r\nHost: x\r\n\r\n", 404, ("worker", "none"))):
            got = small.raw(data)
            assert statuses(got) == [status], (data[:60], got)
            e = json.loads(got[got.index(b"\r\n\r\n") + 4:])["error"]
            assert e["type"] == "invalid_request_error" and e["code"], e
            assert all(p in e["message"] for p in parts), (parts, e)
            assert len(e["message"]) < 300 and e["message"].isprintable(), e


def test_memory_of_large_bodies_goes_back(stub):
    """The tree of a body of numbers is many times its text: it is bounded, and given back when the body is read."""
    def memory(what):
        with open("/proc/%d/status" % big.process.pid) as f:
            return int(re.search(r"^%s:\s+(\d+) kB" % what, f.read(), re.M).group(1)) >> 10
    with Stub("context=1100000") as big:
        assert big.post("/tokenize", prompt="warm " * 100000)[0] == 200
        before = memory("VmRSS")
        most = b'{"prompt": [' + b"1," * 1000000 + b'1], "max_tokens": 1}'
        over = b'{"prompt": [' + b"1," * 4190000 + b'1], "max_tokens": 1}'
        floats = b'{"junk": [' + b"1.5," * 1100000 + b'1], "prompt": "x", "max_tokens": 1}'
        for body, want in (most, 200), (over, 400), (floats, 200):
            r, data = big.request("POST", "/v1/completions", body)
            assert r.status == want, (want, data[:300])
            if want == 400:
                assert "more than 1114112 values" in json.loads(data)["error"]["message"], data
            wait_for("memory back", lambda: memory("VmRSS") < before + 48, 5)
        assert memory("VmHWM") < before + 320, memory("VmHWM")
        # and while the answer is under way
        s = big.connect()
        s.sendall(post_bytes("/v1/completions", b'{"junk": [' + b"1," * 1100000 +
                             b'1], "prompt": "x", "stream": true, "seed": 100000, "ignore_eos": true}'))
        assert s.recv(100)
        wait_for("memory back in mid-stream", lambda: memory("VmRSS") < before + 48, 5)
        s.close()


def test_hostile_json(stub):
    def send(body):
        r, data = stub.request("POST", "/v1/chat/completions", body)
        return r.status, json.loads(data)
    for depth in (100, 10000, 1000000):
        for text in ("[" * depth, '{"x":' + "[" * depth + "]" * depth + "}",
                     '{"messages":' + '{"a":' * depth + "1" + "}" * depth + "}"):
            start = time.monotonic()
            status, body = send(text)
            assert status == 400 and body["error"]["code"] == "invalid_json", (depth, body)
            assert time.monotonic() - start < 2.0 * SLACK
    for text in (b"", b"nonsense", b"[]", b"{", b'{"model":"a","model":"b","messages":[]}',
                 b'{"x":1e999}', b'\xef\xbb\xbf{}', b'{"x":NaN}',
                 b'{"messages":[{"role":"user","content":"\\ud800"}]}',
                 b'{"messages":[{"role":"user","content":"\xff"}]}',
                 b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
                 b'{"messages":[{"role":"user","content":"a\\u0000b"}]}'):
        status, body = send(text)
        assert status == 400, (text, body)
    status, body = send(b'{"messages":[{"role":"user","content":"\\ud83d\\ude00"}]}')
    assert status == 200 and body["choices"][0]["message"]["content"] == "\U0001f600"


def test_text_and_streams_agree(stub):
    texts = ["ABCDEFGHIJK", "x", "\U0001f600\U0001f468‍\U0001f469‍\U0001f467 ภาษาไทย 한국어 \U0001f1e9\U0001f1ea",
             "line\nbreaks \"quotes\" \\ \t", "日本語テキスト"]
    for text in texts:
        for steps in (1, 3, 1000):
            status, body = stub.post("/v1/chat/completions", **chat(text, seed=steps * 100))
            assert status == 200 and body["choices"][0]["message"]["content"] == text, body
            got = joined(stream(stub, "/v1/chat/completions", **chat(text, seed=steps * 100)))
            assert got[0] == text and got[2] == "stop", got
            status, body = stub.post("/v1/completions", prompt=text, seed=steps * 100)
            assert body["choices"][0]["text"] == text
            chunks = stream(stub, "/v1/completions", prompt=text, seed=steps * 100)
            assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == text
    # raw bytes that are no characters, and an unfinished one at the end: once U+FFFD each
    vocabulary = json.load(open(TOKENIZER))["model"]["vocab"]
    decoder = byte_names()
    ids = [vocabulary[decoder[b]] for b in (0x61, 0xC3, 0x28, 0xE2, 0x82)]
    for steps in (1, 2, 5):
        status, body = stub.post("/v1/completions", prompt=ids, seed=steps * 100)
        assert body["choices"][0]["text"] == "a�(�", body
        chunks = stream(stub, "/v1/completions", prompt=ids, seed=steps * 100)
        assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "a�(�"


def byte_names():
    """GPT-2's printable names of bytes."""
    names, extra = {}, 0
    for b in range(256):
        if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255:
            names[b] = chr(b)
        else:
            names[b] = chr(256 + extra)
            extra += 1
    return names


def test_stop_strings(stub):
    cases = [("DEFGHIJ", "ABC", "stop"), ("DEFX", "ABCDEFGHIJK", "stop"),
             (["GH", "DEFGHIJ"], "ABC", "stop"), ("K", "ABCDEFGHIJ", "stop"), ([], "ABCDEFGHIJK", "stop"),
             (["Z"] * 16, "ABCDEFGHIJK", "stop")]
    for stop, want, finish in cases:
        usage = set()
        for steps in (1, 2, 5, 100):
            status, body = stub.post("/v1/chat/completions",
                                     **chat("ABCDEFGHIJK", stop=stop, seed=steps * 100))
            assert body["choices"][0]["message"]["content"] == want, (stop, body)
            assert body["choices"][0]["finish_reason"] == finish
            usage.add(body["usage"]["completion_tokens"])
            chunks = stream(stub, "/v1/chat/completions",
                            **chat("ABCDEFGHIJK", stop=stop, seed=steps * 100,
                                   stream_options={"include_usage": True}))
            assert joined(chunks)[0] == want and joined(chunks)[2] == finish, (stop, chunks)
            usage.add(chunks[-2]["usage"]["completion_tokens"])
        assert len(usage) == 1, usage
    status, body = stub.post("/v1/chat/completions", **chat("ab\U0001f600cd", stop="\U0001f600"))
    assert body["choices"][0]["message"]["content"] == "ab"
    wait_for("stub forgets stopped requests", lambda: stub.metric("stub_running") == 0)


def test_small_max_tokens(stub):
    for k in (1, 2, 3, 7):
        body = chat("hello there my good friend", ignore_eos=True, max_tokens=k, temperature=0)
        status, answer = stub.post("/v1/chat/completions", **body)
        assert answer["usage"]["completion_tokens"] == k
        assert answer["choices"][0]["finish_reason"] == "length"
        chunks = stream(stub, "/v1/chat/completions", **body)
        deltas = [c for c in chunks[:-1] if c["choices"][0]["delta"].get("content")]
        assert len(deltas) == k, chunks
        assert joined(chunks)[2] == "length"
    status, answer = stub.post("/v1/chat/completions", **chat(""))  # the end token comes first
    assert answer["choices"][0]["message"]["content"] == "", answer
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 0


def test_choices(stub):
    for n in (1, 2, 4):
        text = "one two three four five six"
        status, body = stub.post("/v1/chat/completions", **chat(text, n=n, seed=0))
        assert len(body["choices"]) == n and [c["index"] for c in body["choices"]] == list(range(n))
        for usage in (False, True):
            extra = {"stream_options": {"include_usage": True}} if usage else {}
            chunks = stream(stub, "/v1/chat/completions", **chat(text, n=n, seed=0, **extra))
            assert chunks.count("[DONE]") == 1 and chunks[-1] == "[DONE]"
            chunks = chunks[:-1]
            if usage:
                assert chunks[-1]["choices"] == []
                assert chunks[-1]["usage"] == body["usage"], (chunks[-1], body["usage"])
                chunks = chunks[:-1]
            assert all(c["usage"] is None if usage else "usage" not in c for c in chunks)
            for i in range(n):
                mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == i]
                assert mine[0]["delta"].get("role") == "assistant"
                assert sum("role" in c["delta"] for c in mine) == 1
                assert mine[-1]["finish_reason"] == "stop"
                assert all(c["finish_reason"] is None for c in mine[:-1])
                assert joined(chunks, i)[0] == body["choices"][i]["message"]["content"]
    status, body = stub.post("/v1/completions", prompt=["ab", "cd"], n=2, echo=True)
    assert len(body["choices"]) == 4 and body["choices"][3]["text"].startswith("cd"), body


def strict_json(text):
    return json.loads(text, parse_constant=lambda c: 1 / 0)


def test_logprobs(stub):
    for steps in (1, 4, 100):
        body = chat("a few words € here", logprobs=True, top_logprobs=20, seed=steps * 100,
                    top_k=1, temperature=0)
        r, data = stub.request("POST", "/v1/chat/completions", body)
        answer = strict_json(data)
        entries = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) == answer["usage"]["completion_tokens"]
        assert all(isinstance(e["logprob"], float) and len(e["top_logprobs"]) == 20 for e in entries)
        assert bytes(b for e in entries for b in e["bytes"]).decode() == "a few words € here"
        chunks = stream(stub, "/v1/chat/completions", **body)
        streamed = [e for c in chunks[:-1] for ch in c["choices"] if ch["logprobs"]
                    for e in ch["logprobs"]["content"]]
        assert streamed == entries
        r, data = stub.request("POST", "/v1/completions",
                               dict(prompt="some text", logprobs=5, echo=True, seed=steps * 100))
        answer = strict_json(data)
        lp = answer["choices"][0]["logprobs"]
        sizes = {len(lp[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert sizes == {answer["usage"]["completion_tokens"]}, lp
        assert answer["choices"][0]["text"] == "some textsome text"
        assert lp["text_offset"][0] == len("some text")


def test_context_limit(stub):
    with Stub("context=50") as small:
        def ask(n, **more):
            return small.post("/v1/completions", prompt=[40 + i % 20 for i in range(n)], **more)
        assert small.request("GET", "/v1/models")[1].decode().count('"max_model_len": 50') == 1
        for n, more, want in ((48, {}, 200), (49, {}, 200), (50, {}, 400), (51, {}, 400),
                              (48, {"max_tokens": 2}, 200), (48, {"max_tokens": 3}, 400),
                              (49, {"max_tokens": 1}, 200), (49, {"max_tokens": 2}, 400)):
            status, body = ask(n, **more)
            assert status == want, (n, more, body)
            if want == 400:
                message = body["error"]["message"]
                assert str(n) in message and "50" in message, message
                assert body["error"]["code"] == "context_length_exceeded"
        status, body = ask(40, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == 10
        assert body["choices"][0]["finish_reason"] == "length"


def test_failures(stub):
    for how, want, reason in ((2, 502, "worker_lost"), (4, 429, "queue_full"), (5, 503, "no_capacity")):
        for streamed in (False, True):
            r, data = stub.request("POST", "/v1/chat/completions",
                                   chat("one two three four", seed=how, stream=streamed))
            assert r.status == want and r.getheader("Content-Type") == "application/json", data
            assert json.loads(data)["error"]["code"] == reason
            assert b"data:" not in data
            if want in (429, 503):
                assert r.getheader("Retry-After") == "7" and r.getheader("X-Towpath-Reason") == reason
    r, data = stub.request("POST", "/v1/chat/completions", chat("one two three four five six", seed=3))
    assert r.status == 502
    chunks = stream(stub, "/v1/chat/completions", **chat("one two three four five six", seed=3))
    assert chunks[-1]["error"]["code"] == "worker_lost" and "[DONE]" not in chunks
    assert all(c.get("choices", [{}])[0].get("finish_reason") is None for c in chunks[:-1])


def start_stream(stub, body):
    s = stub.connect()
    s.sendall(post_bytes("/v1/chat/completions", dict(body, stream=True)))
    return s


def test_client_closes(stub):
    forever = chat("again and again", ignore_eos=True, max_tokens=4000)
    for how in ("fin", "reset"):
        before = stub.metric("requests_cancelled_by_client_total")
        s = start_stream(stub, forever)
        got = b""
        while got.count(b"data: ") < 5:
            got += s.recv(4096)
        if how == "reset":
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
        wait_for("cancel after " + how, lambda: stub.metric("stub_running") == 0, 2.0)
        assert stub.metric("requests_cancelled_by_client_total") == before + 1
    # half-closed: the answer comes all the same
    s = start_stream(stub, chat("again and again", ignore_eos=True, max_tokens=1500))
    s.shutdown(socket.SHUT_WR)
    data = read_all(s)
    assert b"[DONE]" in data and data.count(b'"finish_reason": "length"') == 1
    # half-closed and nothing to say for a while: still there
    s = start_stream(stub, chat("x", seed=1))
    s.shutdown(socket.SHUT_WR)
    wait_for("silent request runs", lambda: stub.metric("stub_running") == 1)
    time.sleep(1.5)  # longer than it takes to notice a client that has gone
    assert stub.metric("stub_running") == 1
    s.close()
    wait_for("gone after half-close", lambda: stub.metric("stub_running") == 0, 8.0)


def test_clients_leave_before_the_first_token(stub):
    idle = stub.descriptors()
    sockets = [start_stream(stub, chat("x", seed=1)) for _ in range(100)]
    wait_for("100 silent requests", lambda: stub.metric("stub_running") == 100)
    for s in sockets:
        s.close()
    wait_for("all cancelled", lambda: stub.metric("stub_running") == 0, 2.0)
    wait_for("descriptors back", lambda: stub.descriptors() <= idle)


def test_slow_reader_is_cut_off(stub):
    with Stub("max_unsent=65536") as small:
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", small.port))
        for _ in range(1):
            s.sendall(post_bytes("/v1/chat/completions",
                                 chat("again and again", ignore_eos=True, stream=True, logprobs=True,
                                      top_logprobs=20, max_tokens=4000, seed=100 * 50)))
        wait_for("cut off", lambda: small.metric("http_slow_readers_total") == 1, 10)
        wait_for("cancelled", lambda: small.metric("stub_running") == 0)
        s.close()


def test_slow_request_and_limits(stub):
    with Stub("request_ms=2000", "max_connections=3", "max_body=1000") as small:
        s = small.connect()
        start = time.monotonic()
        try:
            for b in b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 1000:
                s.sendall(bytes([b]))
                time.sleep(0.02)
                if time.monotonic() - start > 5 * SLACK:
                    break
                s.setblocking(False)
                try:
                    if s.recv(1000):
                        break
                except BlockingIOError:
                    pass
                s.setblocking(True)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert time.monotonic() - start < 5 * SLACK
        s.close()
        assert small.post("/tokenize", prompt="x" * 2000)[0] == 413
        big = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000
        assert statuses(small.raw(big)) == [413]
        wait_for("connections closed", lambda: small.metric("http_connections") == 1)
        idle = [small.connect() for _ in range(3)]
        time.sleep(0.1)
        assert statuses(read_all(small.connect())) == [503]
        for s in idle:
            s.close()
        wait_for("room again", lambda: small.metric("http_connections") == 1)


def test_expect_continue(stub):
    body = json.dumps(dict(prompt="hello")).encode()
    with stub.connect() as s:
        s.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n"
                  b"Connection: close\r\n\r\n" % len(body))
        assert s.recv(1000).startswith(b"HTTP/1.1 100 ")
        s.sendall(body)
        assert statuses(read_all(s)) == [200]
    with stub.connect() as s:
        s.sendall(b"POST /nope HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n")
        assert statuses(read_all(s)) == [404]


def test_keepalive_comments(stub):
    with Stub("keepalive=1") as kept:
        s = start_stream(kept, chat("x", seed=1))
        data = b""
        while data.count(b": keep-alive\n\n") < 2:
            data += s.recv(4096)
        assert statuses(data) == [200] and b"data:" not in data
        s.close()


def test_large_bodies_go_through_the_pool(stub):
    with Stub("context=1000000") as big:
        text = "word " * 60000
        results = []

        def ask():
            status, body = big.post("/v1/completions", prompt=text, max_tokens=1)
            results.append((status, body["usage"]["completion_tokens"]))
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for t in threads:
            t.start()
        worst = 0.0
        while any(t.is_alive() for t in threads):
            start = time.monotonic()
            assert big.request("GET", "/health")[0].status == 200
            worst = max(worst, time.monotonic() - start)
        for t in threads:
            t.join()
        assert results == [(200, 1)] * 4, results
        # clients that leave while their body is being read
        for _ in range(5):
            s = big.connect()
            s.sendall(post_bytes("/v1/completions", dict(prompt=text)))
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            s.close()
        wait_for("nothing left", lambda: big.metric("http_requests_in_flight") == 0, 10)


def test_labels_do_not_come_from_clients(stub):
    def series():
        _, data = stub.request("GET", "/metrics")
        return len([l for l in data.decode().split("\n") if l and l[0] != "#"])
    before = series()
    rng = random.Random(1)
    c = http.client.HTTPConnection("127.0.0.1", stub.port)
    for i in range(300):
        name = "".join(chr(rng.choice([34, 10, 92, 65 + i % 20, 0x20AC])) for _ in range(20))
        c.request("POST", "/v1/completions", json.dumps(dict(model=name, prompt="x", user=name)),
                  {"X-Thing": str(i)})
        c.getresponse().read()
        c.request("GET", "/path/%d" % i)
        c.getresponse().read()
    assert series() == before


def test_random_disconnects(stub):
    rng = random.Random(5)
    for _ in range(150):
        s = start_stream(stub, chat("again and again", ignore_eos=True, max_tokens=300,
                                    seed=rng.choice([0, 1, 2, 3, 500])))
        if rng.random() < 0.7:
            s.settimeout(0.02)
            try:
                for _ in range(rng.randrange(4)):
                    s.recv(rng.randrange(1, 3000))
            except OSError:
                pass
        if rng.random() < 0.5:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
    wait_for("all ended", lambda: stub.metric("stub_running") == 0 and
             stub.metric("http_requests_in_flight") == 0, 10)
    ended = sum(stub.metric("requests_%s_total" % k) for k in ("finished", "failed", "cancelled"))
    assert stub.metric("requests_started_total") == ended


def test_openai_client(stub):
    try:
        import openai
    except ImportError:
        print("note: the openai package is not installed; its test was left out")
        return
    client = openai.OpenAI(base_url="http://127.0.0.1:%d/v1" % stub.port, api_key="k", max_retries=0)
    assert client.models.list().data[0].id == "towpath"
    messages = [{"role": "user", "content": "hello you"}]
    r = client.chat.completions.create(model="m", messages=messages, logprobs=True, top_logprobs=2)
    assert r.choices[0].message.content == "hello you" and r.usage.prompt_tokens > 0
    assert r.usage.prompt_tokens_details.cached_tokens == 2
    text, usage = "", None
    for c in client.chat.completions.create(model="m", messages=messages, stream=True,
                                            stream_options={"include_usage": True}):
        if c.usage:
            usage = c.usage
        for ch in c.choices:
            text += ch.delta.content or ""
    assert text == "hello you" and usage.completion_tokens == r.usage.completion_tokens
    r = client.completions.create(model="m", prompt="abc", n=2, seed=0, logprobs=2)
    assert len(r.choices) == 2 and r.choices[0].text == "abc"
    for kind, seed in ((openai.BadRequestError, None), (openai.RateLimitError, 4),
                       (openai.InternalServerError, 5)):
        try:
            client.chat.completions.create(model="m", messages=messages, seed=seed,
                                           temperature=9 if seed is None else 1)
            raise AssertionError("no error")
        except kind as e:
            assert e.body["message"] and e.body["type"]
    try:
        for c in client.chat.completions.create(model="m", messages=[
                {"role": "user", "content": "one two three four five six"}], seed=3, stream=True):
            pass
        raise AssertionError("no error from a broken stream")
    except openai.APIError as e:
        assert "worker lost" in str(e)


def test_tool_calls_and_thinking(stub):
    tools = [{"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"cmd": {"type": "string"}}}}} for name in ("run", "look")]
    D = "｜DSML｜"

    def call(name, *params):
        inner = "\n".join('<%sparameter name="%s" string="%s">%s</%sparameter>' % (D, k, s, v, D)
                          for k, s, v in params)
        return '<%sinvoke name="%s">\n%s\n</%sinvoke>' % (D, name, inner, D)
    nested = json.dumps({"a": [{"b": i, "c": "x</y"} for i in range(120)]})
    text = ("I will look.\n\n<%stool_calls>\n" % D + call("run", ("cmd", "true", "ls 2>&1"),
                                                           ("empty", "true", ""), ("n", "false", "-0.5")) +
            "\n" + call("look", ("cmd", "true", "a </ b"), ("deep", "false", nested)) +
            "\n</%stool_calls>" % D)
    want = None
    for thinking in (False, True):
        forced = ("I think.</think>" if thinking else "") + text
        for steps in (1, 5, 9999):
            body = chat(forced, tools=tools, seed=steps * 100,
                        chat_template_kwargs={"thinking": thinking})
            status, answer = stub.post("/v1/chat/completions", **body)
            m = answer["choices"][0]["message"]
            assert answer["choices"][0]["finish_reason"] == "tool_calls", answer
            assert m["content"] == "I will look.", m
            assert m.get("reasoning_content") == ("I think." if thinking else None)
            assert (answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0) == thinking
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in m["tool_calls"]]
            args = [json.loads(a) for _, a in calls]
            assert args[0] == {"cmd": "ls 2>&1", "empty": "", "n": -0.5}, args
            assert args[1]["cmd"] == "a </ b" and args[1]["deep"] == json.loads(nested)
            want = want or calls
            assert calls == want
            content, reasoning, finish, streamed = joined(
                stream(stub, "/v1/chat/completions", **body))
            assert content == "I will look." and finish == "tool_calls"
            assert reasoning == ("I think." if thinking else "")
            assert [(c["name"], c["arguments"]) for c in streamed] == want
            assert all(c["id"] for c in streamed)
    status, answer = stub.post("/v1/chat/completions",
                               **chat(text, tools=tools, parallel_tool_calls=False))
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    # cut in the middle of the second call: a length, and nothing of a block that is not whole
    status, whole = stub.post("/v1/chat/completions", **chat(text, tools=tools))
    cut = whole["usage"]["completion_tokens"] - 12
    for streamed in (False, True):
        body = chat(text, tools=tools, max_tokens=cut)
        if streamed:
            content, _, finish, calls = joined(stream(stub, "/v1/chat/completions", **body))
        else:
            status, answer = stub.post("/v1/chat/completions", **body)
            m = answer["choices"][0]["message"]
            content, finish = m["content"], answer["choices"][0]["finish_reason"]
            calls = m.get("tool_calls", [])
        assert (content, finish, calls) == ("I will look.", "length", []), (content, finish, calls)


def captured(stub, path="/v1/chat/completions", streamed=False, **body):
    """index_capture of the answer, and its text; streams must say the same."""
    if not streamed:
        status, answer = stub.post(path, **body)
        assert status == 200, answer
        assert list(answer["towpath"]) == ["index_capture"]
        choice = answer["choices"][0]
        return answer["towpath"]["index_capture"], choice.get("text", (choice.get("message") or {}).get("content"))
    chunks = stream(stub, path, **body)
    assert chunks[-1] == "[DONE]"
    assert all("towpath" not in c for c in chunks[:-2])
    last = chunks[-2]
    assert last["choices"] == []
    assert ("usage" in last) == bool(body.get("stream_options"))
    text = "".join(ch.get("text") or (ch.get("delta") or {}).get("content") or ""
                   for c in chunks[:-1] for ch in c["choices"])
    return last["towpath"]["index_capture"], text


def test_capture(_):
    """What the stub makes up for layers 2 and 4: entry i asked for has rank step + 1 + i * layer of
    top-k 2, by fp8 keys one better; the prompt's row comes last of all, after the end of the answer."""
    spans = {"text": "kumquat"}
    with Stub("capture=1") as stub:
        status, body = stub.post("/tokenize", **chat("one kumquat two"))
        n_prompt = body["count"]
        for streamed in (False, True):
            for seed in (0, 300, 100000):  # tokens per step: the answer does not depend on it
                c, text = captured(stub, streamed=streamed, seed=seed, **chat("one kumquat two", index_capture={
                    "spans": spans, "steps": "all", "shadow": ["fp8"], "lists": True, "expect": "kumquat"}))
                assert text == "one kumquat two"
                assert c["prompt_tokens"] == n_prompt and len(c["spans"]) == 1
                span = c["spans"][0]
                assert "kumquat" in span["text"] and 0 < span["start"] < span["end"] < n_prompt
                assert span["entries"] == list(range(span["start"] // 4, (span["end"] - 1) // 4 + 2))
                assert [s["step"] for s in c["steps"]] == list(range(len(c["steps"]))) and len(c["steps"]) > 3
                assert [s["phase"] for s in c["steps"]] == ["prefill"] + ["decode"] * (len(c["steps"]) - 1)
                for s in c["steps"]:
                    assert isinstance(s["token"], int)
                    assert [l["layer"] for l in s["layers"]] == [2, 4]
                    for l in s["layers"]:
                        assert (l["topk"], l["visible"], l["list"]) == (2, 100000, [0, 1])
                        ranks = [s["step"] + 1 + i * l["layer"] for i in range(len(span["entries"]))]
                        assert [e["rank"] for e in l["entries"]] == ranks
                        assert [e["selected"] for e in l["entries"]] == [r <= 2 for r in ranks]
                        assert [e["entry"] for e in l["entries"]] == span["entries"]
                        assert [e["tokens"] for e in l["entries"]] == [[max(0, 4 * e - 4), 4 * e + 4]
                                                                       for e in span["entries"]]
                        assert [e["rank"] for e in l["shadow"]["fp8"]["entries"]] == [max(1, r - 1) for r in ranks]
                assert c["truncated"] is False
                v = c["verdict"]
                assert (v["name"], v["best_rank"], v["step"], v["layer"], v["found"]) == ("selected", 1, 0, 2, True), v
                ids = [s["token"] for s in c["steps"]]
                status, back = stub.post("/detokenize", tokens=ids)
                assert back["prompt"] == text, (back, text)
        # the rows of prefill are waited for, also when a stop string ends the answer
        for streamed in (False, True):
            for more in ({}, {"stream_options": {"include_usage": True}} if streamed else {}):
                c, text = captured(stub, streamed=streamed, stop=[" kum"], index_capture={
                    "spans": spans, "expect": "kumquat"}, **chat("one kumquat two", **more))
                assert text == "one", text
                assert [s["step"] for s in c["steps"]] == [0] and "list" not in c["steps"][0]["layers"][0]
                assert c["verdict"]["name"] == "downstream" and c["verdict"]["found"] is False
        # rows of decode alone, too many of them; by step 3 of a rank beyond top-k
        c, _ = captured(stub, **chat("one kumquat two and much more of it", index_capture={
            "spans": spans, "steps": "decode", "max_steps": 2}))
        assert [s["step"] for s in c["steps"]] == [1, 2] and c["truncated"] is True
        assert c["verdict"]["name"] == "selected" and "found" not in c["verdict"]
        # a large prompt is checked on the pool; the row may be large as well
        words = " ".join("word%d" % i for i in range(1200))
        c, _ = captured(stub, path="/v1/completions", prompt="kumquat " + words, max_tokens=1,
                        index_capture={"spans": [[0, 1000], {"text": "word777 "}], "steps": "all"})
        assert len(c["spans"]) == 2 and len(c["steps"][0]["layers"][0]["entries"]) >= 251
        # more than a stream may leave unsent comes in one piece
        c, _ = captured(stub, path="/v1/completions", prompt="kumquat " + words, max_tokens=300, streamed=True,
                        seed=100000, ignore_eos=True,
                        index_capture={"spans": [[0, 2000]], "steps": "all", "max_steps": 300})
        assert len(json.dumps(c)) > 5 << 20 and c["truncated"] is True, len(json.dumps(c))
        # wrong asks
        for ask, param, says in (
                ({"spans": [[0, 10000]]}, ".spans", "has %d tokens" % n_prompt),
                ({"spans": {"text": "walnut"}}, ".spans", "not in the encoded prompt"),
                ({"spans": {"text": "one"}}, ".spans", None),
                ({"spans": {"text": "o"}}, ".spans", "times in the encoded prompt"),
                ({"spans": [[0, 1]], "layers": [3]}, ".layers", "layers with an indexer: 2, 4"),
                ({"spans": [[0, 1]], "steps": "none"}, ".steps", "prefill_last"),
                ({}, ".spans", "missing"), ("all", "", 'is "all"')):
            status, body = stub.post("/v1/chat/completions", index_capture=ask, **chat("one kumquat two"))
            if says is None:
                assert status == 200, body
                continue
            e = body["error"]
            assert status == 400 and e["code"] == "invalid_index_capture", (ask, body)
            assert e["param"] == "index_capture" + param and says in e["message"], (ask, e)
        status, body = stub.post("/v1/chat/completions", n=2, index_capture={"spans": [[0, 1]]}, **chat("x"))
        assert status == 400 and body["error"]["param"] == "index_capture", body
        # keys of other types take half of the context (of the stub), also when max_tokens is not said
        half = {"spans": [[0, 1]], "shadow": ["fp8"]}
        status, body = stub.post("/v1/chat/completions", max_tokens=8000, index_capture=half, **chat("x" * 500))
        assert status == 400 and body["error"]["code"] == "context_length_exceeded", body
        assert "8192" in body["error"]["message"] and "index_capture.shadow" in body["error"]["message"], body
        status, body = stub.post("/v1/completions", prompt=[5] * 8000, ignore_eos=True, seed=100000, index_capture=half)
        assert status == 200 and body["usage"]["completion_tokens"] == 192, body["usage"]
        # a client that goes, and a worker that fails
        s = start_stream(stub, chat("one kumquat two", seed=1, index_capture={"spans": spans}))
        wait_for("running", lambda: stub.metric("stub_running") == 1)
        s.close()
        wait_for("cancelled", lambda: stub.metric("stub_running") == 0)
        status, body = stub.post("/v1/chat/completions", seed=3, index_capture={"spans": spans},
                                 **chat("one kumquat two"))
        assert status == 502, body


def main():
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    tests = [(k, v) for k, v in sorted(globals().items()) if k.startswith("test_") and only in k]
    with Stub() as stub:
        for name, test in tests:
            start = time.monotonic()
            test(stub)
            print("%-48s %.2f s" % (name, time.monotonic() - start), flush=True)
            wait_for("idle after " + name, lambda: stub.metric("stub_running") == 0)


main()
