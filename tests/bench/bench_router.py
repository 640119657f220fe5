#!/usr/bin/env python3
"""What the router adds to a short request: parsing, checks, tokenising, detokenising and the answer.

usage: bench_router.py BUILD_DIR [requests]

The router's client-facing half over a back end that answers at once (tests/cluster/stub_router.c; seed 400: all four tokens in one step), asked over one
kept-alive connection, against an echo server that sends bytes of the same size back, in turns in the same run. Both go
through this client and the kernel's loopback, so the difference of the medians is what the router adds.
"""
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

BUILD = sys.argv[1]
N = int(sys.argv[2]) if len(sys.argv) > 2 else 3000
BODY = b'{"model":"m","messages":[{"role":"user","content":"Who are you?"}],"max_tokens":4,"temperature":0,"seed":400}'
REQUEST = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: "
           + str(len(BODY)).encode() + b"\r\n\r\n" + BODY)


def read_answer(s):
    data = b""
    while b"\r\n\r\n" not in data:
        data += s.recv(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    want = int([l for l in head.lower().split(b"\r\n") if l.startswith(b"content-length:")][0].split(b":")[1])
    while len(rest) < want:
        rest += s.recv(65536)
    return len(head) + 4 + want


def echo_server(listener, answer_bytes):
    s, _ = listener.accept()
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (answer_bytes - 60)
    answer += b"x" * (answer_bytes - 60)
    while True:
        got = 0
        while got < len(REQUEST):
            d = s.recv(65536)
            if not d:
                return
            got += len(d)
        s.sendall(answer)


def connect(port):
    s = socket.create_connection(("127.0.0.1", port))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def ask(s):
    t = time.perf_counter()
    s.sendall(REQUEST)
    n = read_answer(s)
    return time.perf_counter() - t, n


def main():
    with tempfile.TemporaryDirectory() as tmp:
        port_file = os.path.join(tmp, "port")
        p = subprocess.Popen([os.path.join(BUILD, "test/cluster/stub_router"), "deploy/demo-model/tokenizer.json", port_file, "spin=1"],
                             stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 20
            while not (os.path.exists(port_file) and open(port_file).read().endswith("\n")):
                assert p.poll() is None and time.monotonic() < end, "stub_router did not start"
                time.sleep(0.02)
            router = connect(int(open(port_file).read()))
            _, answer_bytes = ask(router)
            listener = socket.create_server(("127.0.0.1", 0))
            threading.Thread(target=echo_server, args=(listener, answer_bytes), daemon=True).start()
            echo = connect(listener.getsockname()[1])
            times = {"router": [], "echo": []}
            for i in range(N):
                times["router"].append(ask(router)[0])
                times["echo"].append(ask(echo)[0])
        finally:
            p.terminate()
            p.wait()
    med = {k: statistics.median(v) * 1e6 for k, v in times.items()}
    p99 = {k: statistics.quantiles(v, n=100)[98] * 1e6 for k, v in times.items()}
    added = med["router"] - med["echo"]
    print("one short chat request, kept-alive, median / p99 us: router %.0f / %.0f, echo %.0f / %.0f"
          % (med["router"], p99["router"], med["echo"], p99["echo"]))
    print("ratio: router adds %.0f us at the median (goal: at most 100)" % added)


main()
