"""harness.py - a real cluster on loopback, for the tests of this folder.

A test starts a Cluster (router, prefill and decode processes with the demo model), talks to it over HTTP, kills or
pauses processes, and closes it; whatever happens, no process is left behind. Waiting is for events: a log line, a
metric, /ready. Only the standard library is used. See README.md for the conventions of a test.
"""
import array
import hashlib
import http.client
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "deploy", "demo-model")
SKIP = 77


def slack():
    """A slow machine may stretch every limit. As test_limit_ms() in tests/support/check.h reads it."""
    text = os.environ.get("TOW_TEST_SLACK") or "1"
    if re.fullmatch(r"[0-9]+\.?[0-9]*", text) and 1 <= float(text) <= 1000:
        return float(text)
    print('TOW_TEST_SLACK "%s": must be a number, 1 to 1000' % text)
    sys.exit(2)


SLACK = slack()


def wait_for(what, fn, seconds=20.0, pause=0.02):
    """Polls until fn() is true; its value. An error names what was waited for."""
    end = time.monotonic() + seconds * SLACK
    while True:
        got = fn()
        if got:
            return got
        if time.monotonic() > end:
            raise AssertionError("not within %.0f s: %s" % (seconds * SLACK, what))
        time.sleep(pause)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def parse_metrics(text):
    """Prometheus text, strictly: {(name, ((label, value), ...)): number}."""
    out, types = {}, {}
    line_re = re.compile(r'^(towpath_[a-z0-9_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)$')
    for line in text.split("\n"):
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types, "two TYPE lines for " + name
            types[name] = kind
        elif line and line[0] != "#":
            m = line_re.match(line)
            assert m, "not exposition text: %r" % line
            labels = tuple(sorted(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', m.group(2) or "")))
            assert (m.group(1), labels) not in out, "twice: %r" % line
            out[m.group(1), labels] = float(m.group(3))
    return out


class Metrics(dict):
    def get_one(self, name, **labels):
        return self["towpath_" + name, tuple(sorted(labels.items()))]

    def total(self, name):
        """The sum over all label values."""
        found = [v for (n, _), v in self.items() if n == "towpath_" + name]
        assert found, "no metric " + name
        return sum(found)


def http_call(port, method, path, body=None, headers=None, timeout=120, host="127.0.0.1"):
    """(status, headers with lower-case names, bytes)."""
    c = http.client.HTTPConnection(host, port, timeout=timeout * SLACK)
    try:
        if body is not None and not isinstance(body, (str, bytes)):
            body = json.dumps(body)
        c.request(method, path, body, headers or {})
        r = c.getresponse()
        data = r.read()
        return r.status, {k.lower(): v for k, v in r.getheaders()}, data
    finally:
        c.close()


class Process:
    """One program of the cluster; restart() runs it again under the same name."""

    def __init__(self, cluster, program, name, argv):
        self.cluster, self.program, self.name, self.argv = cluster, program, name, list(argv)
        self.popen, self.port, self.runs, self.paused = None, 0, 0, False
        self.host, self.prefix = "127.0.0.1", []  # where its status is; what runs it ("ip netns exec NAME", say)
        self.env = {}
        self.log_path = ""

    def start(self, *extra):
        assert self.popen is None or self.popen.poll() is not None
        self.runs += 1
        self.paused = False
        self.log_path = os.path.join(self.cluster.dir, "%s.%d.log" % (self.name, self.runs))
        binary = os.path.join(ROOT, self.cluster.build, "bin", "towpath-" + self.program)
        env = {k: v for k, v in os.environ.items() if not k.startswith("TOWPATH_")}
        env.update(self.env)
        with open(self.log_path, "w") as log:
            self.popen = subprocess.Popen(self.prefix + [binary] + self.argv + list(extra), stdin=subprocess.DEVNULL,
                                          stdout=log, stderr=log, env=env)
        return self

    def restart(self, *extra):
        self.kill()
        self.start(*extra)
        return self.wait_up()

    def wait_up(self, seconds=30):
        """Until it listens; its port is known then."""
        pattern = r"clients on \S+:(\d+), workers on" if self.program == "router" else r"status on \S+?:(\d+), "
        self.port = int(self.wait_log(pattern, seconds).group(1))
        return self

    def log(self):
        with open(self.log_path, errors="replace") as f:
            return f.read()

    def wait_log(self, pattern, seconds=20):
        def look():
            found = re.search(pattern, self.log())
            if not found and self.popen.poll() is not None:
                found = re.search(pattern, self.log())  # its last words
                assert found, "%s ended (%s) before it logged %r:\n%s" % (
                    self.name, self.popen.returncode, pattern, self.log()[-2000:])
            return found
        return wait_for("%s logs %r" % (self.name, pattern), look, seconds)

    @property
    def pid(self):
        return self.popen.pid

    def alive(self):
        return self.popen is not None and self.popen.poll() is None

    def metrics(self):
        status, _, data = http_call(self.port, "GET", "/metrics", timeout=20, host=self.host)
        assert status == 200
        return Metrics(parse_metrics(data.decode()))

    def metric(self, name, **labels):
        return self.metrics().get_one(name, **labels)

    def kill(self):
        if self.alive():
            self.popen.kill()
        if self.popen:
            self.popen.wait()

    def pause(self):
        self.popen.send_signal(signal.SIGSTOP)
        self.paused = True

    def go_on(self):
        self.popen.send_signal(signal.SIGCONT)
        self.paused = False

    def stands_still(self):
        """By SIGSTOP, whoever sent it."""
        with open("/proc/%d/stat" % self.pid) as f:
            return f.read().rsplit(")", 1)[1].split()[0] == "T"

    def terminate(self):
        self.popen.send_signal(signal.SIGTERM)

    def wait(self, seconds=20):
        return self.popen.wait(seconds * SLACK)

    def descriptors(self):
        return len(os.listdir("/proc/%d/fd" % self.pid))

    def threads(self):
        return len(os.listdir("/proc/%d/task" % self.pid))

    def resident(self):
        with open("/proc/%d/statm" % self.pid) as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Stream:
    """A generation request over a socket of its own. Everything that came is kept: status, headers, events."""

    def __init__(self, cluster, body, path="/v1/chat/completions", timeout=120):
        self.body, self.path = dict(body, stream=True), path
        self.status, self.headers, self.events, self.times = None, {}, [], []
        self.error, self.done, self.raw, self.broken = None, False, b"", None
        self.start = time.monotonic()
        self.socket = socket.create_connection(("127.0.0.1", cluster.port), timeout=timeout * SLACK)
        data = json.dumps(self.body).encode()
        self.socket.sendall(b"POST %s HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" %
                            (path.encode(), len(data)) + data)
        self._buffer, self._chunked, self._body = b"", False, b""
        self._ended = False

    # -- reading
    def _fill(self):
        got = self.socket.recv(65536)
        if not got:
            self._ended = True
        self._buffer += got
        return bool(got)

    def _read_head(self):
        while b"\r\n\r\n" not in self._buffer:
            if not self._fill():
                raise AssertionError("connection closed without an answer: %r" % self._buffer)
        head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
        lines = head.decode().split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        if self.status < 200:  # a half-closed client is asked whether it is there with 100 Continue
            return self._read_head()
        self.headers = {k.lower(): v.strip() for k, v in (l.split(":", 1) for l in lines[1:])}
        self._chunked = self.headers.get("transfer-encoding") == "chunked"

    def _unchunk(self):
        """Moves whole chunks to the body; True when the last has come."""
        while True:
            at = self._buffer.find(b"\r\n")
            if at < 0:
                return False
            size = int(self._buffer[:at], 16)
            if len(self._buffer) < at + 2 + size + 2:
                return False
            self._body += self._buffer[at + 2:at + 2 + size]
            self._buffer = self._buffer[at + 2 + size + 2:]
            if size == 0:
                return True

    def _take_events(self):
        while b"\n\n" in self._body:
            block, self._body = self._body.split(b"\n\n", 1)
            for line in block.decode().split("\n"):
                if line.startswith("data: "):
                    assert not self.done, "an event after [DONE]"
                    if line == "data: [DONE]":
                        self.done = True
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        assert self.error is None, "two error events"
                        self.error = event["error"]
                    else:
                        assert self.error is None, "an event after an error"
                    self.events.append(event)
                    self.times.append(time.monotonic() - self.start)
                else:
                    assert line == "" or line.startswith(":"), line

    def read(self, n_events=None):
        """Until n_events have come, or the answer ends. A refusal's JSON is in .raw."""
        if self.status is None:
            self._read_head()
        last = False
        while not last:
            if self._chunked:
                last = self._unchunk()
                if self.status == 200:
                    self._take_events()
            if last or (n_events is not None and len(self.events) >= n_events):
                break
            length = self.headers.get("content-length")
            if length is not None and len(self._buffer) >= int(length):
                self.raw = self._buffer
                break
            if not self._fill():
                assert self.status == 200 and not self._chunked, "cut off in the middle of a stream"
                break
        if last:
            self.raw += self._body
            self.socket.close()
        return self

    def leave(self, how="fin"):
        """The client goes: fin closes, reset closes with RST, half closes the sending side only."""
        if how == "half":
            self.socket.shutdown(socket.SHUT_WR)
            return
        if how == "reset":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    # -- what it says
    def choices(self, index=0):
        return [c for e in self.events for c in e.get("choices", []) if c["index"] == index]

    def text(self, index=0):
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in self.choices(index))

    def reasoning(self, index=0):
        return "".join(c.get("delta", {}).get("reasoning_content") or "" for c in self.choices(index))

    def finish(self, index=0):
        got = [c["finish_reason"] for c in self.choices(index) if c["finish_reason"] is not None]
        assert len(got) <= 1, "finish_reason twice"
        return got[0] if got else None

    def tokens(self, index=0):
        """[(bytes of the token, logprob)] of a chat stream asked with logprobs."""
        return [(bytes(t["bytes"]), t["logprob"]) for c in self.choices(index) if c.get("logprobs")
                for t in c["logprobs"]["content"]]

    def first_token_s(self):
        for e, t in zip(self.events, self.times):
            for c in e.get("choices", []):
                if c.get("text") or c.get("delta", {}).get("content") or c.get("delta", {}).get("reasoning_content"):
                    return t
        return None


class Job(threading.Thread):
    """Runs fn(*args) aside; result() waits and passes its value or its error on."""

    def __init__(self, fn, *args, **named):
        super().__init__(daemon=True)
        self.fn, self.args, self.named = fn, args, named
        self.value, self.problem = None, None
        self.start()

    def run(self):
        try:
            self.value = self.fn(*self.args, **self.named)
        except BaseException as e:  # passed on in result()
            self.problem = e

    def result(self, seconds=180):
        self.join(seconds * SLACK)
        assert not self.is_alive(), "hangs: %r" % (self.fn,)
        if self.problem:
            raise self.problem
        return self.value


class Cluster:
    """A router and its workers. Extra flags: router, workers (both roles), prefill_args, decode_args."""

    def __init__(self, build, prefill=1, decode=1, router=(), workers=(), prefill_args=(), decode_args=(),
                 control=None, model=MODEL, start=True, http_port=0, ready=True):
        self.build, self.model = build, model
        self.folder = tempfile.TemporaryDirectory(prefix="towpath-test-")
        self.dir = self.folder.name
        self.control = control or "ipc://%s/control" % self.dir
        self.workers_flags, self.role_flags = list(workers), {"prefill": list(prefill_args), "decode": list(decode_args)}
        self.router = Process(self, "router", "router", ["--model", model, "--control", self.control, "--http",
                                                         "127.0.0.1:%d" % http_port] + list(router))
        self.prefills = [self.worker("prefill", "p%d" % (i + 1)) for i in range(prefill)]
        self.decodes = [self.worker("decode", "d%d" % (i + 1)) for i in range(decode)]
        self.others = []  # started by the test itself; closed with the rest
        if start:
            try:
                self.router.start().wait_up()
                for w in self.workers:
                    w.start()
                if ready:
                    self.wait_ready()
            except BaseException:
                self.report()
                self.close()
                raise

    @property
    def workers(self):
        return self.prefills + self.decodes

    @property
    def all(self):
        return [self.router] + self.workers

    @property
    def port(self):
        return self.router.port

    def worker(self, role, name, *extra):
        """Not started and in no list yet."""
        return Process(self, role, name, ["--model", self.model, "--join", self.control, "--name", name, "--threads", "1",
                                          "--memory-fraction", "0.05"] +
                       self.workers_flags + self.role_flags[role] + list(extra))

    def __enter__(self):
        return self

    def __exit__(self, kind, value, tb):
        if kind is not None:
            self.report()
        try:
            self.close()
            if kind is None:
                self.check_logs()
        finally:
            self.folder.cleanup()

    def close(self):
        """SIGKILL to all that is left; in this order the workers do not log a lost router."""
        for p in self.workers + self.others + [self.router]:
            p.kill()

    def report(self):
        """Last lines of every log, to stderr."""
        for p in self.all + self.others:
            for n in range(max(1, p.runs - 1), p.runs + 1):
                path = os.path.join(self.dir, "%s.%d.log" % (p.name, n))
                if os.path.exists(path):
                    with open(path, errors="replace") as f:
                        text = f.read().split("\n")
                    state = "runs" if p.alive() else "exit %s" % (p.popen.returncode if p.popen else "-")
                    print("---- %s, run %d (%s)\n%s" % (p.name, n, state, "\n".join(text[-25:])), file=sys.stderr)

    def check_logs(self):
        """No run of any process may have died of an assertion or under a sanitizer."""
        for entry in sorted(os.listdir(self.dir)):
            if entry.endswith(".log"):
                with open(os.path.join(self.dir, entry), errors="replace") as f:
                    text = f.read()
                found = re.search(r"^.*(assertion|AddressSanitizer|ThreadSanitizer|runtime error:|LeakSanitizer).*$", text,
                                  re.M | re.I)
                assert not found, "%s: %s" % (entry, found.group(0))

    # -- state
    def request(self, method, path, body=None, headers=None, timeout=120):
        return http_call(self.port, method, path, body, headers, timeout)

    def post(self, path, **body):
        """(status, JSON)."""
        status, _, data = self.request("POST", path, body)
        return status, json.loads(data)

    def chat(self, content, **more):
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", **dict({"temperature": 0}, messages=messages, **more))

    def stream(self, body, path="/v1/chat/completions"):
        return Stream(self, body, path)

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=30 * SLACK)

    def metric(self, name, **labels):
        return self.router.metric(name, **labels)

    def admin(self):
        status, _, data = self.request("GET", "/admin/workers")
        assert status == 200
        return {w["name"]: w for w in json.loads(data)}

    def is_ready(self):
        return self.request("GET", "/ready", timeout=20)[0] == 200

    def wait_ready(self, workers=None, seconds=60):
        """Until /ready, and each running worker serves and its links to all running ones of the other role are proved."""
        workers = [w for w in (workers or self.workers) if w.alive() and not w.paused]
        for w in workers:
            w.wait_up(seconds)

        def look():
            for w in workers:
                assert w.alive(), "%s ended:\n%s" % (w.name, w.log()[-2000:])
            if not self.is_ready():
                return False
            seen = self.admin()
            for w in workers:
                if seen.get(w.name, {}).get("state") != "serving":
                    return False
                proofs = {p["name"]: p["proof"] for p in seen[w.name]["pairs"]}
                if any(proofs.get(o.name) != "proved" for o in workers if o.program != w.program):
                    return False
            return True
        wait_for("all workers serve", look, seconds)
        return self

    def not_idle(self):
        """What is not at its idle value, as text; empty when all is."""
        out = []
        m = self.router.metrics()
        for state in ("queued", "reserving", "prefilling", "streaming"):
            out.append(("router runs " + state, m.get_one("runs", state=state), 0))
        for name in ("queued_tokens", "tickets", "http_requests_in_flight", "http_buffered_bytes"):
            out.append(("router " + name, m.get_one(name), 0))
        ended = sum(m.get_one("runs_%s_total" % k) for k in ("finished", "failed", "cancelled"))
        out.append(("router runs started", m.get_one("runs_started_total"), ended))
        ended = sum(m.get_one("requests_%s_total" % k) for k in ("finished", "failed", "cancelled"))
        out.append(("router requests started", m.get_one("requests_started_total"), ended))
        for w in self.workers:
            if not w.alive() or w.paused:
                continue
            m = w.metrics()
            out.append((w.name + " tickets", m.total("tickets"), 0))
            out.append((w.name + " move_tickets_live", m.get_one("move_tickets_live"), 0))
            out.append((w.name + " pages free", m.get_one("kv_pages_free"), m.get_one("kv_pages")))
            if w.program == "prefill":
                out.append((w.name + " queued_tokens", m.get_one("queued_tokens"), 0))
        return "; ".join("%s is %g, not %g" % row for row in out if row[1] != row[2])

    def wait_idle(self, seconds=20):
        last = [""]

        def look():
            last[0] = self.not_idle()
            return not last[0]
        try:
            wait_for("idle values", look, seconds, 0.05)
        except AssertionError:
            raise AssertionError("not idle after %.0f s: %s" % (seconds * SLACK, last[0]))

    def measure(self):
        """Descriptors and memory of every process, to be compared with later ones."""
        return {p.name: (p.descriptors(), p.resident()) for p in self.all if p.alive()}

    def wait_measure(self, before, more_bytes=8 << 20, seconds=20):
        last = [""]

        def look():
            worse = []
            for name, (fds, rss) in self.measure().items():
                if fds > before[name][0]:
                    worse.append("%s: %d descriptors, was %d" % (name, fds, before[name][0]))
                if rss > before[name][1] + more_bytes:
                    worse.append("%s: %.1f MiB resident, was %.1f" % (name, rss / 2**20, before[name][1] / 2**20))
            last[0] = "; ".join(worse)
            return not worse
        try:
            wait_for("descriptors and memory", look, seconds, 0.1)
        except AssertionError:
            raise AssertionError("not back after %.0f s: %s" % (seconds * SLACK, last[0]))


# ---- inputs and references ------------------------------------------------------------------------

def smoke(name=None):
    """The cases of smoke.json, or the one whose name begins so."""
    with open(os.path.join(MODEL, "smoke.json")) as f:
        cases = json.load(f)["cases"]
    if name is None:
        return cases
    found = [c for c in cases if c["name"].startswith(name)]
    assert found, "no smoke case " + name
    return found[0]


def smoke_body(case, **more):
    body = dict(messages=case["messages"], temperature=0, **more)
    if case.get("tools"):
        body["tools"] = case["tools"]
    if case["thinking"]:
        body["chat_template_kwargs"] = {"thinking": True}
    return body


def numbers(seed):
    """Endless 32-bit numbers, the same everywhere for one seed."""
    state = hashlib.sha256(str(seed).encode()).digest()
    while True:
        for i in range(0, 32, 4):
            yield int.from_bytes(state[i:i + 4], "little")
        state = hashlib.sha256(state).digest()


def token_ids(n, seed):
    """n ids of ordinary tokens of the demo vocabulary."""
    source = numbers(seed)
    return [40 + next(source) % 2400 for _ in range(n)]


def filler(n_words, seed):
    words = "the plan of this service is in a file and each node will read it when load is high".split()
    source = numbers(seed)
    return " ".join(words[next(source) % len(words)] for _ in range(n_words))


def write_safetensors(path, tensors):
    """tensors: {name: list of int32}."""
    header, data = {}, b""
    for name, values in tensors.items():
        raw = array.array("i", values).tobytes()
        header[name] = {"dtype": "I32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    """{name: (shape, array)} of I32 and F32 tensors."""
    with open(path, "rb") as f:
        raw = f.read()
    n = struct.unpack("<Q", raw[:8])[0]
    out = {}
    for name, t in json.loads(raw[8:8 + n]).items():
        if name != "__metadata__" and t["dtype"] in ("I32", "F32"):
            a, b = t["data_offsets"]
            out[name] = (t["shape"], array.array("i" if t["dtype"] == "I32" else "f", raw[8 + n + a:8 + n + b]))
    return out


def greedy_reference(build, ids, n, *flags):
    """n greedy ids after the prompt, each with its log-probability, computed by towpath-ctl eval in one process."""
    with tempfile.TemporaryDirectory() as d:
        write_safetensors(d + "/in.safetensors", {"prompt": ids, "positions": [len(ids) - 1]})
        done = subprocess.run([os.path.join(ROOT, build, "bin", "towpath-ctl"), "eval", "--model", MODEL, "--tokens",
                               d + "/in.safetensors", "--out", d + "/out.safetensors", "--greedy", str(n), "--threads", "2",
                               "--dump", "logits"] + list(flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout.decode()[-2000:]
        got = read_safetensors(d + "/out.safetensors")
    chosen = list(got["greedy"][1])
    shape, logits = got["greedy_logits"]
    assert shape[0] == n, shape
    out = []
    for i in range(n):
        row = logits[i * shape[1]:(i + 1) * shape[1]]
        top = max(row)
        out.append((chosen[i], row[chosen[i]] - top - math.log(math.fsum(math.exp(x - top) for x in row))))
    return out


# ---- running a test file ------------------------------------------------------------------------------

def run(tests, build, only=()):
    """Calls each test with build; prints one line each; the exit status."""
    failed = 0
    for test in tests:
        if only and not any(o in test.__name__ for o in only):
            continue
        start = time.monotonic()
        try:
            test(build)
            print("ok   %s (%.1f s)" % (test.__name__, time.monotonic() - start), flush=True)
        except Exception:
            failed += 1
            traceback.print_exc()
            print("FAIL %s (%.1f s)" % (test.__name__, time.monotonic() - start), flush=True)
    return 1 if failed else 0


def main(tests, about, options=None):
    """The command line of a test file: BUILD_DIR [--only PART]... and its own options with integer defaults."""
    import argparse
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("build", nargs="?", default="build/release")
    parser.add_argument("--only", action="append", default=[])
    for name, default in (options or {}).items():
        parser.add_argument("--" + name, type=int, default=default)
    args = parser.parse_args()
    if options is not None:
        for name in options:
            options[name] = getattr(args, name)
    for program in ("router", "prefill", "decode"):
        if not os.path.exists(os.path.join(ROOT, args.build, "bin", "towpath-" + program)):
            print("%s/bin/towpath-%s is not built" % (args.build, program), file=sys.stderr)
            sys.exit(1)
    sys.exit(run(tests, args.build, args.only))
