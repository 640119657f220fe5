#!/usr/bin/env python3
"""Workers that die, stop, come back, join and leave while streams run: never a wrong token, never a hang, nothing left behind.
usage: test_kill.py BUILD_DIR [--all 1] [--rounds N]

Every stream asks for log-probabilities and is compared, token by token and bit by bit, with the answer of a quiet run. A stream
either comes out whole, or (where no worker was left) breaks off after right tokens with one error event."""
import random
import signal
import time

import harness
from harness import Cluster, Job, filler, smoke, wait_for

OPTIONS = {"all": 0, "rounds": 3}
LEASE = ["--lease", str(int(3000 * harness.SLACK))]

# A worker kills itself at the Nth pass of a protocol step. The first passes belong to joining, proof and warm-up.
STEPS = [("decode", "take.RESERVE", 3), ("decode", "send.GRANT", 3), ("decode", "send.TOKENS", 9),
         ("decode", "send.FINISH", 2), ("decode", "engine.step", 12), ("decode", "take.OFFER", 3), ("decode", "send.ACK", 4),
         ("prefill", "take.PREFILL", 3), ("prefill", "send.PROGRESS", 4), ("prefill", "send.OFFER", 3),
         ("prefill", "take.ACK", 3), ("prefill", "send.PREFILL_DONE", 2), ("prefill", "engine.step", 3)]
MORE_STEPS = [("decode", "send.HELLO", 1), ("decode", "take.WELCOME", 1), ("decode", "send.HEARTBEAT", 3),
              ("decode", "take.XHELLO", 1), ("decode", "send.XREADY", 1), ("decode", "send.XPROBED", 1),
              ("decode", "send.TOKENS", 1), ("decode", "send.TOKENS", 60), ("decode", "send.ACK", 2),
              ("prefill", "take.PAIR", 1), ("prefill", "send.XHELLO", 1), ("prefill", "send.PAIRED", 1),
              ("prefill", "send.OFFER", 7), ("prefill", "engine.step", 9)]


def bodies():
    out = []
    for i, words in enumerate((3, 40, 90, 150, 300, 700, 20, 500)):
        out.append(dict(messages=[{"role": "user", "content": filler(words, "kill%d" % i)}], ignore_eos=True, max_tokens=60,
                        temperature=0 if i % 2 == 0 else 0.8, seed=i, logprobs=True))
    case = smoke("recall, about 1K")
    out.append(harness.smoke_body(case, logprobs=True, max_tokens=60, ignore_eos=True))
    return out


def finish(s):
    return s.read()


def references(cluster):
    out = []
    for b in bodies():
        s = finish(cluster.stream(b))
        assert s.done and len(s.tokens()) == 60, (s.raw, s.error)
        out.append(s.tokens())
    return out


def judge(streams, want, whole):
    """Tokens are right as far as they go; an answer that is not whole ends with an error. How many were whole."""
    n_whole = 0
    for i, (s, ref) in enumerate(zip(streams, want)):
        if s.status != 200:
            assert s.status in (429, 502, 503, 504) and not s.events, (i, s.status, s.raw)
            got = []
        else:
            got = s.tokens()
        assert got == ref[:len(got)], "stream %d: wrong token at %d" % (
            i, next(k for k, (a, b) in enumerate(zip(got, ref + [None] * 60)) if a != b))
        if s.status == 200 and s.error is None:
            assert s.done and s.finish() == "length" and len(got) == len(ref), (i, s.done, s.finish(), len(got))
            n_whole += 1
        elif s.status == 200:
            assert not s.done and s.finish() is None and s.error["message"] and s.error["code"], (i, s.events[-2:])
    assert not whole or n_whole == len(streams), [
        (s.status, s.error or s.raw) for s in streams if s.status != 200 or s.error]
    return n_whole


def start_streams(cluster):
    return [cluster.stream(b) for b in bodies()]


def read_all(streams, seconds=90):
    jobs = [Job(finish, s) for s in streams]
    for j in jobs:
        j.result(seconds)
    return streams


def cluster_of_four(build, **more):
    return Cluster(build, **dict(dict(prefill=2, decode=2, router=LEASE, workers=LEASE,
                                      prefill_args=["--chunk-tokens", "256"]), **more))


def n_events(streams):
    """Reads what is there; how many events all streams have together."""
    return sum(len(s.events) for s in streams)


def test_killed_at_each_step(build):
    """With a second worker of the kind there, every stream comes out whole wherever the first one dies."""
    with cluster_of_four(build) as c:
        want = references(c)
        steps = STEPS + (MORE_STEPS if OPTIONS["all"] else [])
        for role, point, nth in steps:
            victim = (c.prefills if role == "prefill" else c.decodes)[0]
            victim.kill()
            victim.start("--fault", "%s=%d:kill" % (point, nth))
            early = (role, point, nth) in MORE_STEPS  # it may die while it joins
            if not early:
                c.wait_ready()
            streams = start_streams(c)
            read_all(streams)
            judge(streams, want, True)
            if victim.alive():  # the other worker had more of the work: ask again
                read_all(streams := start_streams(c))
                judge(streams, want, True)
            assert wait_for("%s dies at %s" % (victim.name, point), lambda: not victim.alive(), 10)
            assert victim.popen.returncode == -signal.SIGKILL, (point, victim.popen.returncode, victim.log()[-1000:])
            c.wait_idle(15)
            victim.restart()
            c.wait_ready()
            print("     %s %s: whole" % (role, point), flush=True)
        m = c.router.metrics()
        assert m.get_one("runs_failed_total") == 0 and m.get_one("retries_total") > 0


def test_failed_at_each_step(build):
    """KV-12, KV-13: instead of dying, the worker loses the connection, or the operation, at that step."""
    with cluster_of_four(build) as c:
        want = references(c)
        for role, point, nth in STEPS if OPTIONS["all"] else STEPS[::3]:
            if point == "engine.step":
                continue
            victim = (c.prefills if role == "prefill" else c.decodes)[0]
            victim.kill()
            victim.start("--fault", "%s=%d:fail" % (point, nth))
            c.wait_ready()
            for _ in range(2):
                judge(read_all(start_streams(c)), want, True)
            assert victim.alive(), victim.log()[-1000:]
            c.wait_ready()  # it is back by itself
            c.wait_idle(15)
            victim.restart()
            c.wait_ready()


def test_lost_commands(build):
    """A command to the transfer thread finds no memory: streams come out whole, and no ticket has to wait for its lease."""
    with cluster_of_four(build, workers=["--lease", "60000"]) as c:
        want = references(c)
        for role, command in [("prefill", "send"), ("prefill", "offer"), ("prefill", "touch"), ("decode", "expect"),
                              ("prefill", "cancel"), ("decode", "cancel")]:
            victim = (c.prefills if role == "prefill" else c.decodes)[0]
            victim.restart("--fault", "mover.%s=4:fail,mover.%s=6:fail" % (command, command))
            c.wait_ready()
            judge(read_all(start_streams(c)), want, True)
            long = dict(bodies()[0], messages=[{"role": "user", "content": filler(6000, "lost")}])
            for _ in range(8):  # these are cancelled while they are computed or shipped
                s = c.stream(long)
                s.leave()
            c.wait_idle(15)
            assert victim.alive(), victim.log()[-1000:]
        # a worker that left is forgotten, though the command to forget it was lost at first
        for p in c.prefills:
            p.restart("--fault", "mover.drop=1:fail,mover.drop=3:fail")
        c.wait_ready()
        c.decodes[0].kill()
        wait_for("one decode is left", lambda: c.decodes[0].name not in c.admin() or
                 c.admin()[c.decodes[0].name]["state"] != "serving", 20)
        c.decodes[0].start()
        c.wait_ready()
        judge(read_all(start_streams(c)), want, True)
        c.wait_idle(15)


def test_stopped_at_a_step(build):
    """KV-12 (3): a worker stands still in the middle of a protocol step, and goes on once its work is done elsewhere."""
    with cluster_of_four(build) as c:
        want = references(c)
        for role, point, nth in [("decode", "send.TOKENS", 12), ("prefill", "send.OFFER", 4)] + (
                [("decode", "send.GRANT", 4), ("decode", "send.ACK", 5), ("prefill", "take.PREFILL", 4)] if OPTIONS["all"] else []):
            victim = (c.prefills if role == "prefill" else c.decodes)[0]
            victim.restart("--fault", "%s=%d:stop" % (point, nth))
            c.wait_ready()
            streams = start_streams(c)
            jobs = [Job(finish, s) for s in streams]
            wait_for("%s stops at %s" % (victim.name, point), victim.stands_still, 30)
            victim.paused = True
            for j in jobs:
                j.result(90)
            judge(streams, want, True)
            c.wait_idle(15)
            victim.go_on()
            c.wait_ready()
            judge(read_all(start_streams(c)), want, True)
            c.wait_idle(20)


def test_killed_at_random(build):
    """Prefill, decode or both, at random moments of the streams' life."""
    rng = random.Random(3)
    with cluster_of_four(build) as c:
        want = references(c)
        before = c.metric("retries_total")
        for i in range(OPTIONS["rounds"]):
            victims = [[c.prefills[i % 2]], [c.decodes[i % 2]], [c.prefills[i % 2], c.decodes[i // 2 % 2]]][i % 3]
            streams = start_streams(c)
            jobs = [Job(finish, s) for s in streams]
            wait_for("the moment", lambda n=rng.choice([0, 20, 100, 250]): n_events(streams) >= n, 60, 0.002)
            for v in victims:
                v.kill()
            for j in jobs:
                j.result(90)
            judge(streams, want, True)
            c.wait_idle(15)
            for v in victims:
                v.start()
            c.wait_ready()
        assert c.metric("retries_total") > before
        assert c.metric("runs_failed_total") == 0


def test_all_of_a_kind_killed(build):
    """No worker is left: /ready turns 503 at once, streams wait or end with one error, and go on when one comes back in time."""
    with Cluster(build, router=LEASE + ["--queue-timeout", str(int(8 * harness.SLACK))], workers=LEASE) as c:
        want = references(c)
        kinds = [[c.decodes[0]], [c.prefills[0], c.decodes[0]], [c.prefills[0]]]
        for victims in kinds if OPTIONS["all"] else kinds[:2]:
            # nobody comes back: an end within the queue time
            streams = start_streams(c)
            jobs = [Job(finish, s) for s in streams]
            wait_for("some tokens", lambda: n_events(streams) >= 40, 60, 0.002)
            for v in victims:
                v.kill()
            start = time.monotonic()
            wait_for("/ready is 503", lambda: not c.is_ready(), 20)
            assert time.monotonic() - start < 20 * harness.SLACK
            for j in jobs:
                j.result(60)
            n = judge(streams, want, False)
            if c.decodes[0] in victims:
                assert n < len(streams), "all came out whole without a worker"
            status, headers, _ = c.request("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
            assert status == 503 and 1 <= int(headers["retry-after"]) <= 600, (status, headers)
            c.wait_idle(15)
            for v in victims:
                v.start()
            c.wait_ready()
            # one comes back: the streams go on
            streams = start_streams(c)
            jobs = [Job(finish, s) for s in streams]
            wait_for("some tokens", lambda: n_events(streams) >= 40, 60, 0.002)
            for v in victims:
                v.kill()
                v.start()
            for j in jobs:
                j.result(60)
            judge(streams, want, True)
            c.wait_ready()
            c.wait_idle(15)


def test_stopped(build):
    """KV-12: SIGSTOP of a worker under load. The work goes on elsewhere; what it says after SIGCONT is refused, and it is used
    again."""
    with cluster_of_four(build) as c:
        want = references(c)
        for victim in (c.prefills[0], c.decodes[0]):
            streams = start_streams(c)
            jobs = [Job(finish, s) for s in streams]
            wait_for("some tokens", lambda: n_events(streams) >= 30, 60, 0.002)
            victim.pause()
            for j in jobs:
                j.result(90)
            judge(streams, want, True)
            wait_for("it is taken for dead", lambda: victim.name not in c.admin() or
                     c.admin()[victim.name]["state"] != "serving", 20)
            c.wait_idle(15)
            victim.go_on()
            c.wait_ready()
            judge(read_all(start_streams(c)), want, True)
            c.wait_idle(20)


def test_replaced_at_the_same_name(build):
    """KV-06: decode workers killed and started again under load, in turn; others never need a restart."""
    with cluster_of_four(build) as c:
        want = references(c)
        peers = c.prefills[0].metric("move_peers_up")
        files = [p.descriptors() for p in c.prefills]
        for i in range(OPTIONS["rounds"]):
            streams = start_streams(c)
            jobs = [Job(finish, s) for s in streams]
            wait_for("some tokens", lambda: n_events(streams) >= 60, 60, 0.002)
            c.decodes[i % 2].restart()
            c.router.wait_log(c.decodes[i % 2].name + " is lost: ")
            for j in jobs:
                j.result(90)
            judge(streams, want, True)
            c.wait_ready()
        judge(read_all(start_streams(c)), want, True)
        c.wait_idle(15)
        assert c.prefills[0].metric("move_peers_up") == peers
        for p, n in zip(c.prefills, files):
            wait_for("%s: descriptors do not grow with restarts" % p.name, lambda p=p, n=n: p.descriptors() <= n + 2, 20)


def test_join_and_leave(build):
    """Workers join and are drained at run time (SIGTERM, or the router's admin call): no stream notices."""
    with Cluster(build, prefill=1, decode=1, router=LEASE, workers=LEASE) as c:
        want = references(c)
        for how in ("signal", "admin"):
            streams = start_streams(c)
            jobs = [Job(finish, s) for s in streams]
            wait_for("some tokens", lambda: n_events(streams) >= 20, 60, 0.002)
            old = list(c.workers)
            c.prefills.append(c.worker("prefill", "new-p-" + how).start())
            c.decodes.append(c.worker("decode", "new-d-" + how).start())
            c.wait_ready()
            for w in old:
                if how == "signal":
                    w.terminate()
                else:
                    assert c.request("POST", "/admin/workers/%s/drain" % w.name)[0] == 202
            more = start_streams(c)
            jobs += [Job(finish, s) for s in more]
            for j in jobs:
                j.result(90)
            judge(streams, want, True)
            judge(more, want, True)
            for w in old:
                assert w.wait(30) == 0, (w.name, w.popen.returncode)
                (c.prefills if w in c.prefills else c.decodes).remove(w)
                c.others.append(w)
            wait_for("they have left", lambda: set(c.admin()) == {w.name for w in c.workers})
            c.wait_idle(15)
        assert c.metric("runs_failed_total") == 0
        assert c.request("POST", "/admin/workers/nobody/drain")[0] == 404


def test_router_drains(build):
    """OP-03: SIGTERM while streams run: not ready first, new requests are refused with a reason, streams end whole, exit 0. With a
    limit that is too short the rest end with one error event, on time. A second signal ends at once."""
    with Cluster(build) as c:
        want = references(c)
        streams = start_streams(c)
        jobs = [Job(finish, s) for s in streams]
        wait_for("some tokens", lambda: n_events(streams) >= 20, 60, 0.002)
        waiting = c.connect()
        c.router.terminate()
        c.router.wait_log("draining")
        try:
            status, headers, data = c.request("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
            assert status == 503 and 1 <= int(headers["retry-after"]) <= 600, (status, headers)
            assert c.request("GET", "/ready")[0] == 503
        except ConnectionError:  # it has gone, and a reader may still be at its last bytes
            wait_for("the door is shut once the streams are done", lambda: not any(j.is_alive() for j in jobs), 1)
        for j in jobs:
            j.result(90)
        judge(streams, want, True)
        waiting.close()
        assert c.router.wait(30) == 0
        assert all(w.alive() for w in c.workers)
        # the workers find the next router by themselves
        c.router.argv += ["--drain-timeout", "1"]
        c.router.start().wait_up()
        c.wait_ready()
        long = dict(bodies()[0], max_tokens=20000)
        s = c.stream(long)
        s.read(5)
        start = time.monotonic()
        c.router.terminate()
        s.read()
        assert s.error and s.error["code"] and not s.done and s.finish() is None
        assert c.router.wait(10) == 1 and time.monotonic() - start < 8 * harness.SLACK
        assert "cut short: --drain-timeout (1 s) passed" in c.router.log().splitlines()[-1], c.router.log()[-500:]
        c.router.argv[-1] = "60"
        c.router.start().wait_up()
        c.wait_ready()
        s = c.stream(long)
        s.read(5)
        c.router.terminate()
        c.router.wait_log("draining")
        c.router.terminate()
        assert c.router.wait(5) == 1
        wait_for("workers forget it", lambda: all(w.metrics().total("tickets") == 0 for w in c.workers), 15)


def test_worker_drains(build):
    """OP-03 on a worker: its streams finish or go on elsewhere; a second signal, or one while it loads, ends it at once."""
    with cluster_of_four(build) as c:
        want = references(c)
        for victim, limit in ((c.decodes[0], "60"), (c.decodes[1], "0"), (c.prefills[0], "60"), (c.prefills[1], "0")):
            victim.restart("--drain-timeout", limit)
            c.wait_ready()
            streams = start_streams(c)
            jobs = [Job(finish, s) for s in streams]
            wait_for("some tokens", lambda: n_events(streams) >= 20, 60, 0.002)
            victim.terminate()
            # Streams that go on elsewhere are none the worse, yet this worker's part of them was cut.
            victim.wait(30)
            cut = "drain was cut short" in victim.log().splitlines()[-1]
            assert victim.popen.returncode == cut and (limit == "0" or not cut), (limit, victim.popen.returncode)
            for j in jobs:
                j.result(90)
            judge(streams, want, True)
            c.wait_idle(15)
            victim.start()
            c.wait_ready()
        victim = c.decodes[0]
        s = c.stream(dict(bodies()[0], max_tokens=20000))
        s.read(3)
        victim = next(w for w in c.decodes if w.metric("tickets", state="running") + w.metric("tickets", state="ready") > 0)
        victim.terminate()
        victim.wait_log("draining")
        victim.terminate()
        assert victim.wait(5) == 1
        n = len(s.events)
        s.read(n + 5)  # it goes on at the other
        assert s.error is None
        s.leave()
        c.wait_idle(15)
        early = c.worker("decode", "early")
        c.others.append(early.start())
        early.terminate()
        early.wait(10)


def test_router_killed(build):
    """The router dies: workers drop its tickets by themselves, and join the next one."""
    with Cluster(build, prefill=1, decode=1, workers=LEASE) as c:
        want = references(c)
        files = [w.descriptors() for w in c.workers]
        for _ in range(2):
            streams = start_streams(c)
            for s in streams[:3]:
                s.read(3)
            c.router.kill()
            for s in streams:
                s.leave()
            wait_for("tickets are gone", lambda: all(w.metrics().total("tickets") == 0 for w in c.workers), 20)
            for w in c.workers:
                m = w.metrics()
                assert m.get_one("kv_pages_free") == m.get_one("kv_pages"), w.name
                assert m.get_one("routers_joined") == 0 and http_ready(w) == 503
            c.router.start().wait_up()
            c.wait_ready()
            judge(read_all(start_streams(c)), want, True)
            c.wait_idle(15)
        for w, n in zip(c.workers, files):
            wait_for(w.name + " descriptors", lambda w=w, n=n: w.descriptors() <= n)


def http_ready(worker):
    return harness.http_call(worker.port, "GET", "/ready")[0]


if __name__ == "__main__":
    harness.main([test_killed_at_each_step, test_failed_at_each_step, test_lost_commands, test_stopped_at_a_step, test_killed_at_random, test_all_of_a_kind_killed,
                  test_stopped, test_replaced_at_the_same_name, test_join_and_leave, test_router_drains, test_worker_drains,
                  test_router_killed], __doc__, OPTIONS)
