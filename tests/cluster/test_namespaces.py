#!/usr/bin/env python3
"""Prefill in one network namespace, router and decode in another, a cable between them: the pages go over TCP, by themselves.
usage: test_namespaces.py BUILD_DIR

Nothing tells UCX which transport to take. Both namespaces are on this host, so shared memory could be seen from one to the other;
it must not be chosen, because its wake-ups do not cross. Skipped (77) without root or `ip`."""
import os
import subprocess
import sys

import harness
from harness import Cluster, wait_for

HERE, THERE = "10.97.1.1", "10.97.1.2"  # the cable's ends: router and decode; prefill
other = {"name": None}  # prefill's namespace


def answers(cluster):
    """Token bytes and log-probabilities of requests of 1 page, of several, and of 64 tokens sampled."""
    out = []
    for body in (dict(harness.smoke_body(harness.smoke("identity")), logprobs=True, max_tokens=40),
                 dict(harness.smoke_body(harness.smoke("recall, about 4K")), logprobs=True, max_tokens=40),
                 dict(messages=[{"role": "user", "content": harness.filler(300, 9)}], logprobs=True, temperature=0.8, seed=5,
                      max_tokens=64, ignore_eos=True)):
        s = cluster.stream(body).read()
        assert s.status == 200 and s.done and len(s.tokens()) > 5, (s.status, s.raw, s.error)
        out.append((s.tokens(), s.text()))
    return out


def pair(cluster):
    (proof,) = cluster.admin()["p1"]["pairs"]
    assert proof["proof"] == "proved" and proof["mb_per_s"] > 0, proof
    return proof


def test_tokens_are_the_same_over_tcp(build):
    """One cluster within this namespace (shared memory), then one over the cable: the same tokens, bit for bit."""
    there = other["name"]
    # A device counts when its carrier is there, a moment after it was set up.
    with open("/sys/class/net/tow0/operstate") as f:
        wait_for("the cable is up", lambda: f.seek(0) == 0 and f.read().strip() == "up")
    with Cluster(build, prefill_args=["--chunk-tokens", "256"]) as c:
        assert pair(c)["transport"] in ("posix", "sysv", "memory", "cma"), pair(c)
        want = answers(c)
        c.wait_idle()
    with Cluster(build, prefill_args=["--chunk-tokens", "256", "--status", THERE + ":0"], start=False,
                 control="tcp://%s:%d" % (HERE, harness.free_port())) as c:
        p = c.prefills[0]
        p.prefix, p.host = ["ip", "netns", "exec", there], THERE
        for one in c.all:
            one.start()
        c.router.wait_up()
        c.wait_ready()
        proof = pair(c)
        assert proof["transport"] == "tcp", proof
        status = subprocess.run([os.path.join(harness.ROOT, build, "bin", "towpath-ctl"), "status", "--url",
                                 "http://127.0.0.1:%d" % c.port], stdout=subprocess.PIPE, text=True)
        assert status.returncode == 0 and "pair p1 -> d1: proved, tcp by " in status.stdout, status.stdout
        assert answers(c) == want, "other tokens over TCP"
        m = c.decodes[0].metrics()
        assert m.get_one("move_in_bytes_total") > 1 << 20 and m.get_one("move_bad_digests_total") == 0
        c.wait_idle()
        print("     %s by %s, %d MB/s; %.1f MiB of pages" % (proof["transport"], proof["method"], proof["mb_per_s"],
                                                            m.get_one("move_in_bytes_total") / 2**20), flush=True)
        # a cable that is cut: not ready, a refusal with a reason; mended: ready and right
        ip("-n", there, "link", "set", "tow0", "down")
        wait_for("/ready is 503", lambda: not c.is_ready(), 20)
        ip("-n", there, "link", "set", "tow0", "up")
        c.wait_ready()
        assert answers(c)[0] == want[0]
        c.wait_idle()


def ip(*args):
    return subprocess.run(["ip"] + list(args), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def skip(why):
    print("skipped: network namespaces are needed, and " + why)
    sys.exit(harness.SKIP)


def outside():
    """Makes the two namespaces and runs this file inside the first."""
    here, there = "towh%d" % os.getpid(), "towt%d" % os.getpid()
    if os.geteuid() != 0:
        skip("this is not root")
    try:
        for name in (here, there):
            ip("netns", "add", name)
        ip("link", "add", "tow0", "netns", here, "type", "veth", "peer", "name", "tow0", "netns", there)
        for name, address in ((here, HERE), (there, THERE)):
            ip("-n", name, "addr", "add", address + "/24", "dev", "tow0")
            for device in ("lo", "tow0"):
                ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as e:
        remove(here, there)
        skip("'ip' does not make them: %s" % (getattr(e, "stderr", None) or e))
    try:
        return subprocess.run(["ip", "netns", "exec", here, sys.executable, os.path.abspath(__file__)] + sys.argv[1:] +
                              ["--inside", there]).returncode
    finally:
        remove(here, there)


def remove(*names):
    for name in names:
        try:
            subprocess.run(["ip", "netns", "del", name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError:  # no 'ip' here: then there are no namespaces of ours either
            return


if __name__ == "__main__":
    if "--inside" in sys.argv:
        at = sys.argv.index("--inside")
        other["name"] = sys.argv[at + 1]
        del sys.argv[at:at + 2]
        harness.main([test_tokens_are_the_same_over_tcp], __doc__)
    sys.exit(outside())
