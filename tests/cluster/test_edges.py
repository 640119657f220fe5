#!/usr/bin/env python3
"""What happens at the edges of a running cluster: a paused router, mute connections, a drain limit of nothing."""
import json
import os
import re
import resource
import signal
import socket
import subprocess
import tempfile
import time

import harness


def completion(cluster, seed, n):
    return cluster.stream({"prompt": harness.token_ids(20, seed), "max_tokens": n, "temperature": 0, "ignore_eos": True},
                          "/v1/completions")


def test_pause_of_the_router_is_nobodys_fault(build):
    """Heartbeats lay unread while the router stood still: no worker is called dead and no stream goes elsewhere."""
    with harness.Cluster(build) as c:
        streams = [completion(c, i, 400) for i in range(3)]
        for s in streams:
            s.read(2)
        joins = c.decodes[0].log().count("joined router")
        c.router.pause()
        time.sleep(7)  # longer than the 5 heartbeats after which a silent worker is dead
        c.router.go_on()
        for s in streams:
            s.read()
            assert s.error is None and s.done, s.error
        assert c.metric("retries_total") == 0
        c.router.wait_log("stood still for [0-9]+ ms")
        assert c.decodes[0].log().count("joined router") == joins
        c.wait_idle()


def test_mute_connections_do_not_keep_workers_out(build):
    """More connections than the control port takes, and none says HELLO: they are closed, a worker gets in."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    port = harness.free_port()
    with harness.Cluster(build, control="tcp://127.0.0.1:%d" % port) as c:
        before = c.router.descriptors()
        mute = [socket.create_connection(("127.0.0.1", port)) for _ in range(1040)]
        c.decodes[0].kill()
        c.decodes[0].start()
        c.wait_ready()
        harness.wait_for("mute connections are closed", lambda: c.router.descriptors() <= before + 2)
        for s in mute:
            s.close()
        status, _ = c.post("/v1/completions", prompt=harness.token_ids(5, 1), max_tokens=2)
        assert status == 200
        c.wait_idle()


def last_line(process, *words):
    line = process.log().splitlines()[-1]
    assert all(w in line for w in words), line


def test_second_signal_cuts_a_drain(build):
    """Each program with a request still running: exit 1, and the last line of its log says why. Without work: 0."""
    with harness.Cluster(build) as c:
        for p in (c.router, c.decodes[0], c.prefills[0]):
            if p is c.prefills[0]:
                s = c.stream({"prompt": harness.token_ids(30000, 1), "max_tokens": 1}, "/v1/completions")
                harness.wait_for("it computes", lambda: c.prefills[0].metrics().total("tickets") > 0)
            else:
                s = completion(c, 1, 3000)
                s.read(2)
            p.terminate()
            p.wait_log("draining")
            p.terminate()
            assert p.wait(10) == 1, p.popen.returncode
            last_line(p, "drain was cut short", "signal 15")
            s.socket.close()
            p.start().wait_up()
            c.wait_ready()
            c.wait_idle()


def test_drain_timeout_of_0_ends_at_once(build):
    with harness.Cluster(build, workers=["--drain-timeout", "0"]) as c:
        s = completion(c, 1, 3000)
        s.read(2)
        c.decodes[0].terminate()
        assert c.decodes[0].wait(10) == 1
        last_line(c.decodes[0], "drain was cut short", "--drain-timeout, 0 s")
        s.socket.close()


def test_worker_that_has_drained_does_not_join_again(build):
    """Alone, with its router still there: it leaves with status 0, and nothing joins between BYE and the end."""
    with harness.Cluster(build) as c:
        for w in c.workers:
            w.terminate()
            assert w.wait(20) == 0, w.popen.returncode
            assert w.log().count("joined router") == 1


def end_of(build, program, *flags, before=()):
    """Exit status and output of a program that is not expected to run long."""
    done = subprocess.run(list(before) + [os.path.join(harness.ROOT, build, "bin", "towpath-" + program), "--model", harness.MODEL] +
                          list(flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20 * harness.SLACK)
    return done.returncode, done.stdout.decode()


def test_pool_beyond_the_memory_is_refused_before_it_is_filled(build):
    for program in ("prefill", "decode"):
        status, text = end_of(build, program, "--kv-pages", "100000000", "--threads", "1")
        assert status == 1 and "--kv-pages 100000000: with " in text and " MiB free" in text, text


def with_system(*commands):
    """In namespaces of its own, after these shell commands; None where that is not allowed."""
    words = ["unshare", "-m", "-i"]
    shell = " && ".join(commands)
    if subprocess.run(words + ["sh", "-c", shell], stdout=subprocess.PIPE, stderr=subprocess.STDOUT).returncode != 0:
        print("     no namespaces here: not tried")
        return None
    return words + ["sh", "-c", shell + ' && exec "$@"', "sh"]


def test_too_little_shared_memory_is_explained(build):
    """Docker gives /dev/shm 64 MiB, some give it less: what is there, what is needed, what to do."""
    pool = ["--kv-pages", "64", "--threads", "1", "--join", "tcp://127.0.0.1:1"]
    tiny = with_system("mount -t tmpfs -o size=1m tmpfs /dev/shm")
    if tiny:
        status, text = end_of(build, "decode", *pool, before=tiny)
        assert status == 1 and "/dev/shm has 1024 KiB free and a worker needs 4500 KiB" in text, text
        assert "--shm-size" in text and "UCX_TLS=^posix" in text, text
        text = lines_of(build, "decode", *pool, before=["env", "UCX_TLS=^posix"] + tiny)
        assert "status on" in text and "shared memory" not in text, text
    low = with_system("mount -t proc proc /proc", "sysctl -qw kernel.shmmax=1000000", "sysctl -n kernel.shmmax | grep -qx 1000000")
    if low:
        status, text = end_of(build, "decode", *pool, before=low)
        assert status == 1 and "room for 977 KiB and a worker needs 4500 KiB" in text and "kernel.shmmax" in text, text
    both = with_system("mount -t tmpfs -o size=16m tmpfs /dev/shm", "mount -t proc proc /proc", "sysctl -qw kernel.shmmax=8000000")
    if both:
        text = lines_of(build, "decode", *pool, before=both)
        assert "fit into no shared memory: System V has room for 7813 KiB" in text and "/dev/shm has " in text, text


def test_limits_of_threads_and_stacks_are_told(build):
    """One line before the transport, whose library aborts where a thread or a stack cannot be had."""
    flags = ["--kv-pages", "64", "--threads", "1", "--join", "tcp://127.0.0.1:1"]
    for program in ("prefill", "decode"):
        status, text = end_of(build, program, *flags, "--fault", "net.thread=3:fail")
        assert status == 1 and " threads, 2 could be started: " in text and "ulimit -u" in text, (status, text)
    def stacks(kib):
        return ["sh", "-c", 'ulimit -s %d; exec "$@"' % kib, "sh"]
    for program in ("router", "prefill", "decode"):  # the first peer or request would end it
        for kib in (32, 64, 255):
            status, text = end_of(build, program, before=stacks(kib))
            assert status == 1 and "stacks of %d KiB: at least 256 KiB" % kib in text and text.count("\n") <= 1, (status, text)
    with harness.Cluster(build, start=False) as c:
        for p in c.all:
            p.prefix = stacks(256)
        c.router.start().wait_up()
        for w in c.workers:
            w.start()
        c.wait_ready()
        tool = {"type": "function", "function": {"name": "f", "parameters": json.loads('{"a":' * 55 + "1" + "}" * 55)}}
        assert c.chat("Who are you?", max_tokens=4, tools=[tool] * 2)[0] == 200
        assert c.chat("Who are you? " * 400, max_tokens=4, n=2, logprobs=True, top_logprobs=20)[0] == 200


def test_threads_of_the_router_are_there_before_the_first_client(build):
    """libuv starts its pool with the first large body, and aborts where it gets no thread."""
    with harness.Cluster(build) as c:
        before = c.router.threads()
        with open("/proc/%d/statm" % c.router.pid) as f:
            bytes_now = int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        subprocess.run(["prlimit", "--pid", str(c.router.pid), "--as=%d:" % (bytes_now + (7 << 20))], check=True)  # no stack more
        status, _, _ = c.request("POST", "/v1/completions", {"prompt": "warm " * 2000, "max_tokens": 2})
        assert status == 200 and c.router.threads() == before, (status, before, c.router.threads())


def test_file_size_limit_is_an_error_and_no_signal(build):
    """Shared memory and logs are files to the limit: what cannot be written is told, where the default is to be killed."""
    at_limit = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh"]
    status, text = end_of(build, "decode", "--kv-pages", "64", "--threads", "1", "--join", "tcp://127.0.0.1:1", before=at_limit)
    assert status == 1 and "File too large" in text, (status, text)
    with tempfile.TemporaryFile() as log:
        p = subprocess.Popen(at_limit + [os.path.join(harness.ROOT, build, "bin", "towpath-router"), "--model", harness.MODEL,
                                         "--http", "127.0.0.1:0", "--control", "tcp://127.0.0.1:0", "--drain-timeout", "0"],
                             stderr=log)
        try:
            # From then on the signal is a drain, which it logs.
            harness.wait_for("it catches SIGTERM", lambda: catches(p.pid, signal.SIGTERM))
            p.terminate()
            assert p.wait(10) == 0
        finally:
            p.kill()
            p.wait()


def test_too_few_descriptors_are_told_at_start(build):
    """UCX would abort: what is needed and how that is counted, what the limit is; a soft limit is raised."""
    def at(soft, hard):
        return ["prlimit", "--nofile=%d:%d" % (soft, hard)]
    worker = ["--kv-pages", "4", "--threads", "1", "--join", "tcp://127.0.0.1:1"]
    for hard in (12, 20, 40, 300):
        status, text = end_of(build, "prefill", *worker, before=at(hard, hard))
        assert status == 1 and "open files: 337 needed (48 for itself, " in text and "hard limit is %d:" % hard in text, text
        assert text.count("\n") == 1, text
    text = lines_of(build, "decode", *worker, before=at(12, 337))
    assert "status on" in text, text
    status, text = end_of(build, "router", "--http", "127.0.0.1:0", "--control", "tcp://127.0.0.1:0", before=at(20, 1000))
    assert status == 1 and "open files: 5232 needed" in text and "4096 clients (--max-connections)" in text, text
    assert "hard limit is 1000:" in text, text


def test_too_little_address_space_is_told_at_start(build):
    flags = ["--kv-pages", "200", "--threads", "1", "--join", "tcp://127.0.0.1:1"]
    status, text = end_of(build, "decode", *flags, before=["prlimit", "--as=%d" % (600 << 20)])
    assert status == 1 and "address space: " in text and "for 200 pages" in text and "the limit is 600 MiB" in text, text
    text = lines_of(build, "decode", *flags, before=["prlimit", "--as=%d" % (1500 << 20)])
    assert "status on" in text, text

    # The router: one line whatever the limit, and at the number it names it starts.
    flags = ["--http", "127.0.0.1:0", "--control", "tcp://127.0.0.1:0"]
    for kib in (60000, 100000, 120000):
        status, text = end_of(build, "router", *flags, before=["prlimit", "--as=%d" % (kib << 10)])
        assert status == 1 and text.count("\n") == 1 and "the limit is %d MiB" % round(kib / 1024) in text, text
    needed = int(re.search(r"address space: (\d+) MiB needed", text).group(1))
    text = lines_of(build, "router", *flags, before=["prlimit", "--as=%d" % (needed + 1 << 20)], until=b"clients on")
    assert "clients on" in text, text


def test_passes_that_find_no_memory_name_the_flag(build):
    """Of a small device, too: what passes need follows from --chunk-tokens, not from what a request asks."""
    small = ["sh", "-c", 'ulimit -v 700000; exec "$@"', "sh"]
    flags = ["--chunk-tokens", "65536", "--context-length", "65536", "--kv-pages", "300", "--threads", "1", "--join", "tcp://127.0.0.1:1"]
    for device in ("cpu", "apart:cpu"):
        status, text = end_of(build, "prefill", *flags, "--device", device, before=small)
        assert status == 1 and "with passes of 65536 tokens (--chunk-tokens): " in text and "no memory" in text, (status, text)


def test_model_names_that_are_refused(build):
    for name, said in ((b"a\xffb", "byte 1 (0xff) is no UTF-8"), (b"a\nb", "byte 1 (0x0a) is of a control character"),
                       (b"\xc2\x85", "byte 0 (0xc2) is of a control character"), (b"m" * 201, "201 bytes, at most 200")):
        status, text = end_of(build, "router", "--served-model-name", name)
        assert status == 1 and text.count("\n") == 1 and "--served-model-name: " + said in text, text


def catches(pid, number):
    with open("/proc/%d/status" % pid) as f:
        mask = [line for line in f if line.startswith("SigCgt:")][0].split()[1]
    return int(mask, 16) >> (number - 1) & 1 == 1


def lines_of(build, program, *flags, before=(), until=b"status on"):
    """What it logs until it has started."""
    p = subprocess.Popen(list(before) + [os.path.join(harness.ROOT, build, "bin", "towpath-" + program), "--model", harness.MODEL] +
                         list(flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = b""
    try:
        for line in p.stdout:
            text += line
            if until in line:
                break
    finally:
        p.kill()
        p.wait()
        p.stdout.close()
    return text.decode()


def test_start_says_nothing_of_ucx(build):
    """Settings that a transport in use does not read are no reason to complain, nor are those of UCX as a whole."""
    for transports in ("all", "tcp", "posix,self", "sysv,tcp"):
        text = lines_of(build, "prefill", "--kv-pages", "4", "--threads", "1", "--join", "tcp://127.0.0.1:1",
                        before=["env", "UCX_TLS=" + transports, "UCX_WARN_UNUSED_ENV_VARS=y"])
        assert "status on" in text and "UCX" not in text, text


def test_one_router_joined_by_two_names_is_joined_once(build):
    status, text = end_of(build, "decode", "--kv-pages", "4", "--join", "tcp://127.0.0.1:1,tcp://127.0.0.1:1")
    assert status == 1 and "stands there twice" in text, text
    port = harness.free_port()
    with harness.Cluster(build, control="tcp://127.0.0.1:%d" % port) as c:
        d = c.worker("decode", "d9")
        c.others.append(d)
        d.argv[d.argv.index("--join") + 1] += ",tcp://localhost:%d" % port
        d.start().wait_log("are the same router")
        harness.wait_for("d9 serves", lambda: c.admin().get("d9", {}).get("state") == "serving")
        before = c.metric("retries_total")  # the second joining may have cut the warm-up of the first
        s = completion(c, 1, 200)
        s.read()
        assert s.error is None and c.metric("retries_total") == before
        assert c.admin()["d9"]["state"] == "serving"


def test_router_that_cannot_be_reached_is_named_once(build):
    with harness.Cluster(build, prefill=0, decode=1, start=False) as c:
        c.decodes[0].start().wait_log(r"warn .*router ipc://\S+ not reached: ")
        c.router.start()
        c.decodes[0].wait_log("joined router")
        assert c.decodes[0].log().count("not reached") == 1


if __name__ == "__main__":
    harness.main([test_pause_of_the_router_is_nobodys_fault, test_mute_connections_do_not_keep_workers_out,
                  test_second_signal_cuts_a_drain, test_drain_timeout_of_0_ends_at_once, test_worker_that_has_drained_does_not_join_again,
                  test_pool_beyond_the_memory_is_refused_before_it_is_filled,
                  test_too_little_shared_memory_is_explained, test_limits_of_threads_and_stacks_are_told,
                  test_threads_of_the_router_are_there_before_the_first_client,
                  test_file_size_limit_is_an_error_and_no_signal,
                  test_too_few_descriptors_are_told_at_start, test_too_little_address_space_is_told_at_start,
                  test_passes_that_find_no_memory_name_the_flag,
                  test_model_names_that_are_refused,
                  test_start_says_nothing_of_ucx,
                  test_one_router_joined_by_two_names_is_joined_once,
                  test_router_that_cannot_be_reached_is_named_once], __doc__)
