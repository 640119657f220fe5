#!/usr/bin/env python3
"""Workers that are there and do not work: broken fetches, a hung engine, a failed device, a dead transport. Nobody calls them well.
usage: test_health.py BUILD_DIR"""
import json
import os
import socket
import time

import harness
from harness import Cluster, Job, http_call, token_ids, wait_for

BROKEN_FETCH = "kv.get=20+:fail"  # the first ones belong to joining, proof and warm-up


def ask(cluster, seed=1, n=4, **more):
    return cluster.post("/v1/completions", **dict(dict(prompt=token_ids(40, seed), max_tokens=n, temperature=0, ignore_eos=True,
                                                       logprobs=1), **more))


def told(cluster, name):
    """How the router sees that worker."""
    return cluster.admin().get(name, {}).get("state", "gone")


def health(process, path="/health"):
    try:
        return http_call(process.port, "GET", path, timeout=2)[0]
    except OSError:
        return 0


def use_up(cluster, worker):
    """Requests until one had to go elsewhere."""
    before = cluster.metric("retries_total")
    for i in range(200):
        assert ask(cluster, i, 1)[0] == 200
        if cluster.metric("retries_total") > before:
            return
    raise AssertionError("%s never failed" % worker.name)


def test_failing_worker_is_left_out(build):
    """RT-04: one of three accepts and then fails: cannot fetch, or cuts the connection when asked. No client notices; after a few
    failures it gets only probes (or, not warm again, nothing); repaired, its share."""
    with Cluster(build, decode=3) as c:
        sick = c.decodes[1]
        for fault in (BROKEN_FETCH, "send.GRANT=5+:fail"):
            sick.restart("--fault", fault)
            c.wait_ready()
            use_up(c, sick)
            start, before = time.monotonic(), c.metric("retries_total")
            for i in range(100):
                status, answer = ask(c, i, 1)
                assert status == 200, answer
                if i % 2:
                    assert c.request("GET", "/v1/models")[0] == 200
            seconds, retries = time.monotonic() - start, c.metric("retries_total") - before
            # two more to be left out, then probes after 1, 2, 4, 8, 8 ... s
            assert retries <= 2 + 4 + seconds / 8, (retries, seconds)
            assert c.is_ready() and all(told(c, w.name) == "serving" for w in c.workers if w is not sick)
            print("     %s: %d retries in %d requests, %.1f s" % (fault, retries, 100, seconds), flush=True)
            sick.restart()
            c.wait_ready()
            moved = sick.metric("move_in_bytes_total")

            def has_its_share():
                for i in range(6):
                    assert ask(c, i, 1)[0] == 200
                return sick.metric("move_in_bytes_total") > moved
            wait_for("it gets work again", has_its_share, 10)
            assert c.metric("runs_failed_total") == 0
            c.wait_idle()


def test_failure_is_no_success(build):
    """RT-06: pages that never arrive. Streamed or not it is a 5xx with a JSON body, nothing of a 200; then it is repaired."""
    with Cluster(build, router=["--queue-timeout", "3"]) as c:
        for victim, fault in ((c.decodes[0], "kv.get=8+:fail"), (c.prefills[0], "kv.offer=8+:fail")):
            victim.restart("--fault", fault)
            c.wait_ready()
            wait_for("it fails", lambda: ask(c)[0] != 200, 30)
            for path, body in (("/v1/completions", dict(prompt=token_ids(300, 1), max_tokens=3)),
                               ("/v1/chat/completions", dict(messages=[{"role": "user", "content": "Who are you?"}]))):
                answers = [Job(c.request, "POST", path, dict(body, stream=streamed)) for streamed in (False, True)]
                for status, headers, data in (a.result(60) for a in answers):
                    assert 500 <= status < 600, (status, data)
                    assert headers["content-type"] == "application/json", headers
                    error = json.loads(data)["error"]
                    assert error["message"] and error["type"] == "server_error" and error["code"], error
            # Once a failed link's pause is over the next request may try it, and until then the router is ready: so after a try.
            wait_for("not ready after another try", lambda: ask(c)[0] != 200 and not c.is_ready(), 30)
            victim.restart()
            c.wait_ready()
            c.wait_idle()
        for more in (dict(), dict(max_tokens=1), dict(tools=[{"type": "function", "function": {
                "name": "get_weather", "description": "Weather of a city", "parameters": {
                    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}])):
            status, answer = c.chat("What is the weather in Oslo?", **more)
            assert status == 200 and "content" in answer["choices"][0]["message"], answer


class Watchdog:
    """The other end of systemd's notification socket."""

    def __init__(self, process, folder):
        self.path = os.path.join(folder, process.name + ".notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.setblocking(False)
        process.env = {"NOTIFY_SOCKET": self.path, "WATCHDOG_USEC": "1000000"}

    def take(self):
        """What has come since, joined."""
        out = b""
        while True:
            try:
                out += self.socket.recv(4096) + b"\n"
            except BlockingIOError:
                return out


def test_hung_engine(build):
    """OP-01 (1, 3): the engine's thread hangs, with work or idle, while the process answers. /health and /ready fail within the limit,
    the watchdog is fed no more, the router sends nothing there, the work is done elsewhere with the same tokens."""
    with Cluster(build, prefill=2, decode=2, workers=["--step-limit", "2"]) as c:
        want = ask(c, 5, 30)
        assert want[0] == 200
        for victim, fault in ((c.decodes[0], "engine.step=12:hang"), (c.prefills[0], "engine.step=3:hang"),
                              (c.decodes[1], "engine.probe=2:hang")):
            dog = Watchdog(victim, c.dir)
            victim.restart("--fault", fault)
            c.wait_ready()
            feeding = wait_for("the watchdog is fed", lambda: b"WATCHDOG=1" in dog.take(), 5) if has_systemd(build) else False
            assert health(victim) == 200
            if "probe" not in fault:
                jobs = []
                while victim.metric("engine_step_age_seconds") < 0.5:
                    jobs = [j for j in jobs if j.is_alive()] or [Job(ask, c, 5, 30) for _ in range(4)]
                for j in jobs:
                    status, answer = j.result(60)
                    assert status == 200 and answer["choices"] == want[1]["choices"], answer
            wait_for("/health fails", lambda: health(victim) == 503, 8)
            assert health(victim, "/ready") == 503
            wait_for("the router has left it", lambda: told(c, victim.name) != "serving", 10)
            dog.take()
            if feeding:
                time.sleep(1.5)  # three feeding times
                assert b"WATCHDOG=1" not in dog.take()
            assert c.is_ready() and ask(c, 5, 30)[1]["choices"] == want[1]["choices"]
            victim.env = {}
            victim.restart()
            c.wait_ready()
        assert c.metric("runs_failed_total") == 0
        c.wait_idle()


def has_systemd(build):
    with open(os.path.join(harness.ROOT, build, "bin", "towpath-decode"), "rb") as f:
        return b"libsystemd.so" in f.read()


def test_paused_while_idle(build):
    """OP-01 (1): SIGSTOP without traffic: not ready within some heartbeats; after SIGCONT all is as before."""
    with Cluster(build) as c:
        for victim in c.workers:
            victim.pause()
            wait_for("/ready is 503", lambda: not c.is_ready(), 10)
            assert health(victim) == 0
            victim.go_on()
            c.wait_ready()
            assert ask(c)[0] == 200


def test_failed_device(build):
    """OP-01 (2): an error of the device ends the worker, at once and with a reason; the router is not ready from then on."""
    with Cluster(build) as c:
        for victim in c.workers:
            victim.restart("--fault", "engine.step=4+:fail")
            c.wait_ready()
            jobs = [Job(ask, c, i, 8) for i in range(3)]
            assert victim.wait(20) == 1
            assert "error" in victim.log() and "injected fault" in victim.log()
            wait_for("/ready is 503", lambda: not c.is_ready(), 5)
            victim.restart()
            c.wait_ready()
            for j in jobs:
                assert j.result(60)[0] == 200  # it waited for the next one
        c.wait_idle()


def test_every_pass_fails(build):
    """A worker none of whose passes succeeds ends with the reason, and is not `starting` for ever; one that fails twice in a row goes on."""
    with Cluster(build) as c:
        for victim in c.workers:
            victim.restart("--fault", "engine.memory=1:fail,engine.memory=2:fail")
            c.wait_ready()
            victim.restart("--fault", "engine.memory=1+:fail")
            assert victim.wait(30) == 1
            assert victim.log().strip().split("\n")[-1].endswith("injected lack of memory"), victim.log()
            victim.restart()
            c.wait_ready()
        c.wait_idle()


def test_transport_down(build):
    """OP-01 (4): the link dies under two healthy processes and cannot be made again: not ready, requests are told so; then it heals."""
    with Cluster(build, router=["--queue-timeout", str(int(2 * harness.SLACK))]) as c:
        d = c.decodes[0]
        d.restart("--fault", "link.ping=1+:fail,send.XPONG=1+:fail,send.XREADY=2+:fail")
        wait_for("the link was proved and is down", lambda: "prefill p1 down" in d.log() or "decode d1 down" in
                 c.prefills[0].log().split("decode d1 up")[-1], 30)
        wait_for("/ready is 503", lambda: not c.is_ready(), 10)
        assert all(w.alive() and health(w) == 200 for w in c.workers)
        status, headers, data = c.request("POST", "/v1/completions", dict(prompt=token_ids(40, 1), max_tokens=2))
        assert status == 503 and headers["x-towpath-reason"] == "no_capacity" and int(headers["retry-after"]) >= 1, (status, data)
        d.restart()
        c.wait_ready()
        assert ask(c)[0] == 200
        c.wait_idle()


def test_worker_gone_deaf(build):
    """A worker's data link stops hearing for ever while the worker lives, after it worked for a while or in its first proof, at
    either end. No greeting is answered; the router has that end make its link anew. Nobody restarts it, nothing is lost or left."""
    with Cluster(build, router=["--queue-timeout", str(int(90 * harness.SLACK))]) as c:
        want = ask(c, 5, 20)
        assert want[0] == 200
        # decode hears 18 messages in a proof and two a second after it; prefill's second one ends the first half of a proof
        for victim, nth in ((c.decodes[0], 40), (c.decodes[0], 1), (c.prefills[0], 2)):
            victim.restart("--fault", "link.jam=%d:fail" % nth)
            if nth == 40:
                c.wait_ready()
                files = victim.descriptors()
                wait_for("the link is dead", lambda: not c.is_ready(), 60)
            begin = time.monotonic()
            waiting = Job(ask, c, 5, 20)
            victim.wait_log("the data link is new", 60)
            c.wait_ready(seconds=15)
            print("     %s, message %d: healed after %.1f s" % (victim.name, nth, time.monotonic() - begin), flush=True)
            for status, answer in (waiting.result(), ask(c, 5, 20)):
                assert status == 200 and answer["choices"] == want[1]["choices"], answer
            assert all(w.alive() for w in c.workers) and victim.metric("worker_relinks_total") == 1
            assert victim.name + ": told to make its data link anew" in c.router.log()
            c.wait_idle()
            if nth == 40:
                wait_for("descriptors are back", lambda: victim.descriptors() <= files, 10)
            victim.restart()
            c.wait_ready()
        assert c.metric("relinks_asked_total") >= 3 and c.metric("runs_failed_total") == 0


if __name__ == "__main__":
    harness.main([test_failing_worker_is_left_out, test_failure_is_no_success, test_hung_engine, test_paused_while_idle,
                  test_failed_device, test_every_pass_fails, test_transport_down,
                  test_worker_gone_deaf], __doc__)
