#!/usr/bin/env python3
"""The router's HTTP side over a real cluster, with sockets of our own: framing, disconnects, refusals, keys, limits, texts.
usage: test_http.py BUILD_DIR"""
import json
import os
import re
import socket
import time

import harness
from harness import Cluster, filler, http_call, smoke, wait_for

FOREVER = dict(messages=[{"role": "user", "content": "go on"}], ignore_eos=True, max_tokens=2000, temperature=0)


class Shared:
    cluster = None


def shared(build):
    if Shared.cluster is None:
        Shared.cluster = Cluster(build)
    return Shared.cluster


def talk(port, data, finish=True):
    """Sends data; all that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20 * harness.SLACK) as s:
        s.sendall(data)
        if finish:
            s.shutdown(socket.SHUT_WR)
        got = b""
        while True:
            try:
                more = s.recv(65536)
            except ConnectionResetError:
                return got
            if not more:
                return got
            got += more


def statuses(data):
    return [int(s) for s in re.findall(rb"HTTP/1\.1 (\d{3}) ", data) if s != b"100"]


def test_framing(build):
    """RT-18: on the router and on each worker's own port: one parser, ambiguous requests never run."""
    c = shared(build)
    inner = b"POST /admin/workers/d1/drain HTTP/1.1\r\nHost: x\r\n\r\n"
    for p in c.all:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        bad = [b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"Transfer-Encoding: chunked\r\n"
               b"Content-Length: 0\r\n\r\n0\r\n\r\n", b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n",
               b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
               b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n0x\r\n\r\n",
               b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n00000000000000001\r\nx\r\n",
               b"Transfer-Encoding: chunked\r\n\r\n1\nx\n0\n\n", b"Content-Length : 0\r\n\r\n", b"X: a\r\n b\r\n\r\n",
               b"X: a\0b\r\n\r\n", b"Content-Length: +1\r\n\r\nx", b"Content-Length: 1x\r\n\r\nx"]
        for b in bad:
            got = statuses(talk(p.port, head + b + inner))
            assert len(got) == 1 and got[0] in (400, 501, 413, 405, 404), (p.name, b, got)
            if p is c.router:
                assert got[0] in (400, 501), (b, got)
        got = statuses(talk(p.port, b"GET /health HTTP/1.1\r\n\r\n" + inner))
        assert got == [400], (p.name, got)
    got = statuses(talk(c.port, b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner))
    assert len(got) == 1 and got[0] in (400, 501), got
    # a body that is itself a request is only a body
    got = statuses(talk(c.port, b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner))
    assert got == [400], got
    assert c.admin()["d1"]["state"] == "serving"


def test_pipelining(build):
    c = shared(build)
    body = json.dumps({"prompt": "hi"}).encode()
    data = (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nPOST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) +
            body + b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n")
    for cut in range(0, len(data), 7):
        with c.connect() as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            s.sendall(data[:cut])
            s.sendall(data[cut:])
            s.shutdown(socket.SHUT_WR)
            got = b""
            while True:
                more = s.recv(65536)
                if not more:
                    break
                got += more
        assert statuses(got) == [200, 200, 404], (cut, got)


def running(c):
    m = c.decodes[0].metrics()
    return m.get_one("tickets", state="ready") + m.get_one("tickets", state="running")


def test_client_closes(build):
    """RT-01: FIN and RST stop the work on both servers; a half-close alone does not."""
    c = shared(build)
    c.wait_idle()
    for how in ("fin", "reset"):
        before = c.metric("requests_cancelled_by_client_total")
        s = c.stream(FOREVER)
        s.read(5)
        assert running(c) == 1
        s.leave(how)
        start = time.monotonic()
        wait_for("decode stops after " + how, lambda: running(c) == 0, 5)
        took = time.monotonic() - start
        c.wait_idle(5)
        assert took < 2.0 * harness.SLACK, took
        assert c.metric("requests_cancelled_by_client_total") == before + 1
    s = c.stream(dict(FOREVER, max_tokens=50))
    s.read(5)
    s.leave("half")
    s.read()
    assert s.done and s.finish() == "length"
    s = c.stream(dict(FOREVER, max_tokens=30))
    s.leave("half")  # before the answer has begun
    s.read()
    assert s.done and s.finish() == "length"
    c.wait_idle()


def test_gone_before_the_first_token(build):
    """RT-02: 60 clients whose requests wait leave; descriptors and places come back."""
    with Cluster(build, prefill=1, decode=0, ready=False) as c:
        c.prefills[0].wait_up()
        wait_for("prefill has joined", lambda: c.metric("workers", role="prefill") == 1)
        before = c.router.descriptors()
        streams = [c.stream(FOREVER) for _ in range(60)]
        wait_for("all wait", lambda: c.metric("runs", state="queued") == 60)
        for i, s in enumerate(streams):
            s.leave("reset" if i % 2 else "fin")
        wait_for("none waits", lambda: c.metric("runs", state="queued") == 0, 5)
        wait_for("descriptors are back", lambda: c.router.descriptors() <= before, 5)
        assert c.metric("requests_cancelled_by_client_total") == 60
        c.wait_idle()


def test_refusals_of_streams(build):
    """RT-05: stream: true refused is JSON with a status, never an event."""
    c = shared(build)
    text = {"messages": [{"role": "user", "content": "x"}]}
    limit = json.loads(c.request("GET", "/v1/models")[2])["data"][0]["max_model_len"]
    for body in (dict(text, temperature=-1), dict(text, max_tokens=limit), dict(text, n=0), {"messages": 5}, {}):
        status, headers, data = c.request("POST", "/v1/chat/completions", dict(body, stream=True))
        assert status == 400 and headers["content-type"] == "application/json", (body, status, headers)
        error = json.loads(data)["error"]
        assert error["message"] and error["type"] and error["code"] and b"data:" not in data
    status, headers, data = c.request("POST", "/v1/chat/completions", b'{"stream": true, ')
    assert status == 400 and headers["content-type"] == "application/json"


def test_hostile_json(build):
    """RT-16, RT-15: depth, size, doubled keys, numbers, bytes that are no text; alive and quick after each."""
    c = shared(build)
    texts = []
    for depth in (1000, 100000, 1000000):
        texts += ["[" * depth, '{"x":' + "[" * depth + "]" * depth + "}", '{"messages":' + '{"a":' * depth + "1" + "}" * depth + "}",
                  '{"tools":[{"type":"function","function":{"name":"f","parameters":' + '{"a":' * depth]
    texts += ["", "nonsense", "[]", "{", '{"model":"a","model":"b"}', '{"x":1e999}', '{"x":' + "9" * 1000000 + "}", '{"x":NaN}']
    hard = [t.encode() for t in texts] + [
        b'{"messages":[{"role":"user","content":"%s"}]}' % b for b in
        (b"\\ud800", b"\\udc00\\ud800", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80")]
    for body in hard:
        start = time.monotonic()
        status, headers, data = c.request("POST", "/v1/chat/completions", body)
        assert status == 400 and json.loads(data)["error"]["code"], (body[:60], status, data[:200])
        assert time.monotonic() - start < 2 * harness.SLACK, body[:60]
        assert c.request("GET", "/health")[0] == 200
    many = "{" + ",".join('"k%d":1' % i for i in range(200000)) + ',"messages":[{"role":"user","content":"Who are you?"}]}'
    assert c.request("POST", "/v1/chat/completions", many)[0] in (200, 400)
    status, answer = c.chat("\U0001f600 Who are you?", max_tokens=3)
    assert status == 200, answer


def test_methods_and_paths(build):
    c = shared(build)
    for path, allow in (("/v1/chat/completions", "POST"), ("/v1/completions", "POST"), ("/tokenize", "POST"),
                        ("/detokenize", "POST"), ("/v1/models", "GET"), ("/health", "GET"), ("/ready", "GET"),
                        ("/metrics", "GET"), ("/admin/workers", "GET"), ("/admin/workers/d1/drain", "POST")):
        status, headers, data = c.request("GET" if allow == "POST" else "DELETE", path)
        assert status == 405 and allow in headers["allow"], (path, status, headers)
        assert json.loads(data)["error"]["code"]
    status, headers, data = c.request("GET", "/nope")
    assert status == 404 and json.loads(data)["error"]["type"]
    for p in c.workers:
        assert http_call(p.port, "GET", "/health")[0] == 200 and http_call(p.port, "GET", "/ready")[0] == 200
        assert http_call(p.port, "GET", "/nope")[0] == 404
        status, headers, _ = http_call(p.port, "POST", "/metrics")
        assert status == 405 and "GET" in headers["allow"], headers


def test_keys(build):
    with Cluster(build, prefill=0, decode=0, start=False, ready=False) as c:
        path = os.path.join(c.dir, "keys")
        with open(path, "w") as f:
            f.write("sentinel-key-one\nsentinel-key-two\n")
        os.chmod(path, 0o600)
        c.router.argv += ["--api-key-file", path]
        c.router.start().wait_up()
        for method, url in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
                            ("GET", "/admin/workers"), ("POST", "/admin/workers/x/drain")):
            for headers in ({}, {"Authorization": "Bearer sentinel-key-on"}, {"Authorization": "Basic sentinel-key-one"}):
                status, got, data = c.request(method, url, "{}" if method == "POST" else None, headers)
                assert status == 401 and got["www-authenticate"], (url, status)
                assert json.loads(data)["error"]["type"] == "authentication_error"
        for url, want in (("/health", 200), ("/ready", 503), ("/metrics", 200)):
            assert c.request("GET", url)[0] == want
        for key in ("one", "two"):
            assert c.request("GET", "/v1/models", None, {"Authorization": "Bearer sentinel-key-" + key})[0] == 200
        assert "sentinel" not in c.router.log() and b"sentinel" not in c.request("GET", "/metrics")[2]


def test_limits(build):
    """413 for a large body, by length and by chunks; connections at once; a request that drips is ended."""
    with Cluster(build, prefill=0, decode=0, router=["--max-body-bytes", "2000", "--max-connections", "20"], ready=False) as c:
        status, _, data = c.request("POST", "/tokenize", {"prompt": "x" * 3000})
        assert status == 413 and json.loads(data)["error"]["code"], data
        chunked = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nbb8\r\n" + b"x" * 3000 + b"\r\n"
        assert statuses(talk(c.port, chunked)) == [413]
        assert statuses(talk(c.port, b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")) in ([414], [431], [400])
        assert statuses(talk(c.port, b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 200000 + b"\r\n\r\n")) == [431]
        assert c.post("/tokenize", prompt="hello")[0] == 200
        wait_for("one connection", lambda: c.metric("http_connections") == 1)
        held = [c.connect() for _ in range(20)]
        wait_for("all are taken", lambda: len(os.listdir("/proc/%d/fd" % c.router.pid)) > 20)
        assert statuses(talk(c.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")) in ([503], [])
        # dripping: one byte at a time keeps nothing open for ever
        drip = held.pop(0)
        drip.settimeout(0.2)
        start, data = time.monotonic(), b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + b"x" * 900
        for s in held:
            s.close()
        ended = False
        for i in range(len(data)):
            try:
                drip.sendall(data[i:i + 1])
                if drip.recv(100) == b"":
                    ended = True
            except TimeoutError:
                pass
            except OSError:
                ended = True
            if ended or time.monotonic() - start > 75 * harness.SLACK:
                break
        took = time.monotonic() - start
        assert 55 < took < 70 * harness.SLACK, "a dripping request ended after %.1f s, not 60" % took


def test_tokenize(build):
    """Round trips; LD-09: the text of control tokens in a client's words never becomes control tokens."""
    c = shared(build)
    with open(os.path.join(harness.MODEL, "tokenizer.json")) as f:
        added = json.load(f)["added_tokens"]
    control = {t["id"]: t["content"] for t in added}
    texts = ["", "hello world", "  two  spaces \n\t", "日本語 \U0001f600\U0001f468‍\U0001f469‍\U0001f467 ภาษาไทย", "é́ ﬁ x",
             filler(300, 1)]
    for text in texts:
        status, got = c.post("/tokenize", prompt=text)
        assert status == 200 and got["count"] == len(got["tokens"]), got
        status, back = c.post("/detokenize", tokens=got["tokens"])
        assert status == 200 and back["prompt"] == text, (text, back)
    for bad in ({"prompt": 5}, {"prompt": None}, {}, {"prompt": ["a"]}, {"prompt": "a\0b"}):
        assert c.post("/tokenize", **bad)[0] == 400
    for bad in ({"tokens": [-1]}, {"tokens": [2560]}, {"tokens": "x"}, {"tokens": [1.5]}, {}):
        assert c.post("/detokenize", **bad)[0] == 400
    plain = c.post("/tokenize", messages=[{"role": "user", "content": "x"}])[1]["tokens"]
    n_control = sum(i in control for i in plain)
    for t in added:
        word = t["content"]
        half = len(word) // 2
        for messages in ([{"role": "user", "content": "a " + word + " b"}],
                         [{"role": "system", "content": word}, {"role": "user", "content": "x"}],
                         [{"role": "user", "content": word[:half]}, {"role": "user", "content": word[half:]}]):
            status, got = c.post("/tokenize", messages=messages)
            assert status == 200, got
            text = c.post("/detokenize", tokens=got["tokens"])[1]["prompt"]
            assert messages[0]["content"] in text, (word, text)
            inside = [i for i in got["tokens"] if i in control and control[i] == word]
            same = [i for i in plain if control.get(i) == word]
            assert len(inside) <= len(same) + (len(messages) - 1), (word, messages, text)
    # a tool's result and arguments
    word = "<｜Assistant｜>"
    messages = [{"role": "user", "content": "x"},
                {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": {
                    "name": "f", "arguments": json.dumps({"a": word})}}]},
                {"role": "tool", "tool_call_id": "c1", "content": word}]
    got = c.post("/tokenize", messages=messages)[1]["tokens"]
    marks = [i for i in got if control.get(i) == word]
    clean = json.loads(json.dumps(messages, ensure_ascii=False).replace(word, "word"))
    assert len(marks) == sum(control.get(i) == word for i in c.post("/tokenize", messages=clean)[1]["tokens"]), n_control


def test_context_limit(build):
    """LD-10: prompt + max_tokens <= N, exactly, the same N everywhere; N from the option and from the pool."""
    for flags, limit in ((["--context-length", "300"], 300), (["--kv-pages", "2"], 512)):
        with Cluster(build, workers=flags) as c:
            assert json.loads(c.request("GET", "/v1/models")[2])["data"][0]["max_model_len"] == limit
            assert all(w["capacity"]["max_context"] == limit for w in c.admin().values())
            for n, more, good in ((limit - 2, None, True), (limit - 1, None, True), (limit, None, False), (limit + 1, None, False),
                                  (limit - 2, 1, True), (limit - 2, 2, True), (limit - 2, 3, False), (limit - 1, 1, True),
                                  (limit - 1, 2, False), (10, limit - 10, True), (10, limit - 9, False)):
                body = dict(prompt=harness.token_ids(n, n), ignore_eos=True, temperature=0)
                if more:
                    body["max_tokens"] = more
                status, answer = c.post("/v1/completions", **body)
                if good:
                    assert status == 200, (limit, n, more, answer)
                    assert answer["usage"]["completion_tokens"] == (more or limit - n), (limit, n, more, answer)
                    assert answer["choices"][0]["finish_reason"] == "length"
                else:
                    assert status == 400 and answer["error"]["code"] == "context_length_exceeded", (limit, n, more, answer)
                    assert str(n) in answer["error"]["message"] and str(limit) in answer["error"]["message"], answer
            c.wait_idle()


def test_labels(build):
    """OP-04: what clients send never becomes a label; the exposition stays parseable."""
    c = shared(build)

    def series():
        return len(c.router.metrics())
    before = series()
    for i in range(60):
        name = 'm%d"\n\\{}é' % i * (1 + 500 * (i % 7 == 0))
        c.post("/v1/completions", model=name, prompt="x", user=name, max_tokens=1)
        c.request("GET", "/%d" % i)
    assert series() == before
    for w in c.workers:
        w.metrics()


def test_characters(build):
    """RT-11: characters that are split over tokens come whole, the same streamed and not."""
    c = shared(build)
    for text in ("日本語テキスト", "\U0001f600 \U0001f468‍\U0001f469‍\U0001f467", "ภาษาไทย 한국어 \U0001f1e9\U0001f1ea"):
        ids = c.post("/tokenize", prompt=text)[1]["tokens"]
        bias = {str(i): 40 for i in set(ids)}  # the answer is made of these bytes, in whatever order
        body = dict(prompt=text, max_tokens=24, ignore_eos=True, temperature=1, seed=3, logit_bias=bias)
        whole = c.post("/v1/completions", **body)[1]["choices"][0]["text"]
        assert c.stream(body, "/v1/completions").read().text() == whole
    ids = c.post("/tokenize", prompt="日")[1]["tokens"]
    if len(ids) > 1:  # a prompt that ends in the middle of a character shows nothing of itself
        status, answer = c.post("/v1/completions", prompt=ids[:-1], max_tokens=4, ignore_eos=True, temperature=0)
        assert status == 200
        got = c.stream(dict(prompt=ids[:-1], max_tokens=4, ignore_eos=True, temperature=0), "/v1/completions").read()
        assert got.text() == answer["choices"][0]["text"]


def test_keepalive_of_silent_streams(build):
    """RT-17: with --sse-keepalive a silent stream gets comments, between events only."""
    with Cluster(build, prefill=1, decode=0, router=["--sse-keepalive", "1"], ready=False) as c:
        c.prefills[0].wait_up()
        s = c.stream(FOREVER)
        s.socket.settimeout(20 * harness.SLACK)
        s._read_head()
        assert s.status == 200
        while s._body.count(b":") < 2:
            s._fill()
            s._unchunk()
        assert b"data:" not in s._body
        c.decodes.append(c.worker("decode", "d1").start().wait_up())
        s.read(5)
        assert len(s.events) >= 5 and s.error is None
        s.leave()
        c.wait_idle()


def last(build):
    if Shared.cluster:
        Shared.cluster.wait_idle()
        status, answer = Shared.cluster.chat("Who are you?")
        assert status == 200 and answer["choices"][0]["message"]["content"] == smoke("identity")["greedy_text"].replace(
            "<｜end▁of▁sentence｜>", "")
        Shared.cluster.__exit__(None, None, None)


if __name__ == "__main__":
    try:
        harness.main([test_framing, test_pipelining, test_client_closes, test_gone_before_the_first_token, test_refusals_of_streams,
                      test_hostile_json, test_methods_and_paths, test_keys, test_limits, test_tokenize, test_context_limit,
                      test_labels, test_characters, test_keepalive_of_silent_streams, last], __doc__)
    finally:
        if Shared.cluster:
            Shared.cluster.close()
