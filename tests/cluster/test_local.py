#!/usr/bin/env python3
"""deploy/local.sh: `up` is ready only when its own cluster is, and a start that cannot succeed ends at once.

usage: test_local.py BUILD_DIR
"""
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import harness

BUILD = os.path.abspath(sys.argv.pop(1) if len(sys.argv) > 1 else "build/release")
SCRIPT = os.path.join(harness.ROOT, "deploy", "local.sh")
ENV = {k: v for k, v in os.environ.items() if not k.startswith("TOW")}


class Local(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.TemporaryDirectory()

    def tearDown(self):
        for run in os.listdir(self.dir.name):
            self.sh("down", run=run)
        self.dir.cleanup()

    def start(self, *args, run="a", ready_s=100, cwd=None, **env):
        env = dict(ENV, **dict({"TOW_BIN": os.path.join(BUILD, "bin"), "TOW_RUN": os.path.join(self.dir.name, run),
                                "TOW_READY_S": str(int(ready_s * harness.SLACK))}, **env))
        return subprocess.Popen(["sh", SCRIPT, *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                stdin=subprocess.DEVNULL, text=True, cwd=cwd)

    def sh(self, *args, **how):
        p = self.start(*args, **how)
        out = p.communicate()[0]
        return subprocess.CompletedProcess(p.args, p.returncode, out)

    def of_this_cluster(self):
        """Processes that inherited our TOW_RUN, whether a list names them or not; not those that have ended."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open("/proc/%s/environ" % pid, "rb") as f:
                    if self.dir.name.encode() in f.read():
                        found.append(pid)
            except OSError:
                pass
        return found

    def idle_prefill(self):
        """A folder of programs whose prefill says one line and joins nobody: nothing is ever ready."""
        bin_ = tempfile.TemporaryDirectory()
        self.addCleanup(bin_.cleanup)
        real = os.path.join(BUILD, "bin", "towpath-prefill")
        for p in ("router", "decode"):
            os.symlink(os.path.join(BUILD, "bin", "towpath-" + p), os.path.join(bin_.name, "towpath-" + p))
        with open(os.path.join(bin_.name, "towpath-prefill"), "w") as f:
            f.write('#!/bin/sh\n[ "$1" = --help ] && exec "%s" --help\necho idle\nexec tail -f /dev/null\n' % real)
        os.chmod(f.name, 0o755)
        return bin_.name

    def processes(self, run):
        path = os.path.join(self.dir.name, run, "processes")
        if not os.path.exists(path):
            return []
        with open(path) as f:
            return f.read().split("\n")[:-1]

    def failed(self, r, run, *words):
        """Exit 1 with these words, and nothing of it runs on."""
        self.assertEqual(r.returncode, 1, r.stdout)
        for w in words:
            self.assertIn(w, r.stdout)
        self.assertEqual(self.processes(run), [])
        self.assertEqual(self.sh("status", run=run).returncode, 3)

    def test_another_router_on_the_port(self):
        http = "127.0.0.1:%d" % harness.free_port()
        r = self.sh("up", "--http", http)
        self.assertEqual((r.returncode, r.stdout), (0, "ready at http://%s\n" % http))
        started = time.monotonic()
        self.failed(self.sh("up", "--http", http, run="b"), "b", "router ended", http.split(":")[1])
        self.assertLess(time.monotonic() - started, 90 * harness.SLACK)  # not after all of TOW_READY_S
        r = self.sh("status")
        self.assertEqual((r.returncode, r.stdout.count("running"), "\nready at" in r.stdout), (0, 3, True), r.stdout)

        # one of three is dead: status says so, and asks no stranger whether it is ready
        router = self.processes("a")[0].split()
        self.assertEqual(router[0], "router")
        os.kill(int(router[1]), 9)
        harness.wait_for("status sees it", lambda: "router: ended" in self.sh("status").stdout)
        r = self.sh("status")
        self.assertEqual((r.returncode, "not ready at" in r.stdout), (1, True), r.stdout)

    def test_refused_worker_ends_the_start(self):
        os.makedirs(os.path.join(self.dir.name, "a"))
        with open(os.path.join(self.dir.name, "a", "prefill-7.log"), "w") as f:
            f.write("of an earlier start\n")
        http = "127.0.0.1:%d" % harness.free_port()
        r = self.sh("up", "--http", http, "--", "--name", "foo")
        self.failed(r, "a", "was refused", "refuses: ", "foo")
        self.assertNotIn("earlier", r.stdout)

    def test_only_own_logs_are_shown(self):
        os.makedirs(os.path.join(self.dir.name, "a"))
        with open(os.path.join(self.dir.name, "a", "prefill-7.log"), "w") as f:
            f.write("of an earlier start\n")
        r = self.sh("up", "--http", "127.0.0.1:%d" % harness.free_port(), ready_s=0, TOW_BIN=self.idle_prefill())
        self.failed(r, "a", "not ready within 0 s", "router.log", "decode-0.log")
        self.assertNotIn("earlier", r.stdout)

    def test_flags_that_cannot_work_are_refused(self):
        """Before anything starts, in one line."""
        for args, words in ((["--", "--control", "tcp://127.0.0.1:9"], ("--control after --", "before --")),
                            (["--", "--model=x"], ("--model after --", "before --")),
                            (["--", "--join", "tcp://127.0.0.1:9"], ("--join after --", "--control")),
                            (["--", "--status=127.0.0.1:0"], ("--status after --",)),
                            (["--", "--check-config"], ("--check-config after --", "ends at once")),
                            (["--", "--nonsense"], ("no program knows --nonsense",)),
                            (["--control", "tcp://127.0.0.1:0"], ("--control", "1 to 65535")),
                            (["--control", "tcp://a:1,tcp://b:1"], ("--control", "one URL")),
                            (["--control", ""], ("--control", "empty")),
                            (["--prefill-device", "cpu,,cpu"], ("--prefill-device: 'cpu,,cpu'", "empty device")),
                            (["--decode-device", ""], ("--decode-device: ''", "empty device")),
                            (["--prefill-device", "cpu,cpu"], ("--prefill-device: 'cpu,cpu'", "2 devices", "--prefill", "(1)")),
                            (["--decode", "2", "--decode-device", "cpu,cpu,cpu"], ("3 devices", "--decode has", "(2)")),
                            (["--decode-device", "cpu", "--", "--device=cpu"], ("--device after --", "once"))):
            r = self.sh("up", *args)
            self.failed(r, "a", *words)
            self.assertEqual(r.stdout.count("\n"), 1, r.stdout)
        for value in ("a\\cb", "", "0", "08", "010", "-1", "1x", "0x1", "64", "99999999999999999999"):
            for flag in ("--prefill", "--decode"):
                r = self.sh("up", flag, value)
                self.failed(r, "a", "%s: '%s'" % (flag, value), "a whole number, 1 to 63")
                self.assertEqual(r.stdout.count("\n"), 1, r.stdout)
        self.failed(self.sh("up", "--prefill", "40", "--decode", "40"), "a", "--decode: '40'", "1 to 24")
        for name in ("TOW_READY_S", "TOW_DRAIN_S"):
            r = self.sh("up", **{name: "08"})
            self.assertEqual((r.returncode, r.stdout.count("\n")), (1, 1), r.stdout)
            self.assertIn(name + ": '08'", r.stdout)
        with open(os.path.join(harness.ROOT, "router", "registry.h")) as f:
            self.assertIn("#define RTR_MAX_WORKERS 64\n", f.read())

    def test_program_that_ends_without_a_word(self):
        bin_ = self.idle_prefill()
        with open(os.path.join(bin_, "towpath-prefill"), "a+") as f:
            f.seek(0)
            text = f.read().split("echo idle")[0]
            f.truncate(0)
            f.write(text)
        r = self.sh("up", "--http", "127.0.0.1:%d" % harness.free_port(), TOW_BIN=bin_)
        self.failed(r, "a", "prefill-0 ended", "prefill-0.log is empty")

    def test_control_and_paths_of_the_caller(self):
        """--control is the address of both sides, `status` tells it, and a worker joins there by hand; paths count from
        the caller's folder."""
        os.symlink(harness.MODEL, os.path.join(self.dir.name, "some-model"))
        control = "tcp://127.0.0.1:%d" % harness.free_port()
        how = {"cwd": self.dir.name, "TOW_RUN": "a"}
        r = self.sh("up", "--model", "some-model", "--control", control, "--http", "127.0.0.1:%d" % harness.free_port(),
                    "--", "--log-level", "info", **how)
        self.assertEqual(r.returncode, 0, r.stdout)
        r = self.sh("status", **how)
        self.assertEqual(r.returncode, 0, r.stdout)
        self.assertEqual(re.search("^workers join at (.*)$", r.stdout, re.M).group(1), control)
        log = os.path.join(self.dir.name, "a", "by-hand.txt")
        with open(log, "w") as f:
            p = subprocess.Popen([os.path.join(BUILD, "bin", "towpath-decode"), "--model", harness.MODEL, "--join", control,
                                  "--name", "by-hand"], env=ENV, stdin=subprocess.DEVNULL, stdout=f, stderr=f)
        try:
            def joined():
                with open(log) as f:
                    return "joined router" in f.read()
            harness.wait_for("it has joined", joined)
        finally:
            p.kill()
            p.wait()

    def test_devices_by_role(self):
        """Each worker of a role takes the next of the role's devices; one that is none ends the start."""
        http = "127.0.0.1:%d" % harness.free_port()
        r = self.sh("up", "--http", http, "--decode", "2", "--decode-device", "cpu,cpu", "--", "--log-level", "info")
        self.assertEqual(r.returncode, 0, r.stdout)
        flags = {}
        for line in self.processes("a"):
            name, pid = line.split()[:2]
            with open("/proc/%s/cmdline" % pid) as f:
                flags[name] = f.read().split("\0")
        for name in ("decode-0", "decode-1"):
            self.assertEqual(flags[name][flags[name].index("--device") + 1], "cpu", flags[name])
        for name in ("router", "prefill-0"):
            self.assertNotIn("--device", flags[name])
        self.assertEqual(self.sh("down").returncode, 0)
        r = self.sh("up", "--http", http, "--decode", "2", "--decode-device", "cpu,gpu:7")
        self.failed(r, "a", "decode-1 ended", "gpu:7")
        # It is neither a pattern of the names in the caller's folder nor does it have escapes.
        for device in ("*", "a\\nb"):
            r = self.sh("up", "--http", http, "--decode-device", device, cwd=self.dir.name)
            self.failed(r, "a", "decode-0 ended", '--device "%s": ' % device)

    def test_up_that_is_ended_takes_its_cluster_down(self):
        for signum, n in ((signal.SIGTERM, 3), (signal.SIGTERM, 1), (signal.SIGHUP, 3)):
            p = self.start("up", "--http", "127.0.0.1:%d" % harness.free_port(), TOW_BIN=self.idle_prefill())
            harness.wait_for("%d started" % n, lambda: len(self.processes("a")) >= n)
            p.send_signal(signum)
            out = p.communicate()[0]
            self.assertEqual(p.returncode, 128 + signum, out)
            self.assertEqual(self.processes("a"), [])
            self.assertEqual(self.of_this_cluster(), [])

    def test_demo_runs_on_the_device_that_is_named(self):
        for env, rc, words in (({"DEVICE": "gpu"}, 1, ("on gpu", '--device "gpu": must be')),
                               ({"TOW_DEVICE": "gpu"}, 1, ("on gpu", '--device "gpu": must be')),
                               ({"DEVICE": "cpu", "TOW_DEVICE": "cuda:0"}, 2, ("DEVICE 'cpu' and TOW_DEVICE 'cuda:0'",)),
                               ({"DEVICE": "cpu"}, 0, ("on cpu", "tk_7h2m9qxa."))):
            base = {k: v for k, v in ENV.items() if k != "DEVICE"}
            r = subprocess.run(["sh", os.path.join(harness.ROOT, "deploy", "run-demo.sh")], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, env=dict(base, TOW_BIN=os.path.join(BUILD, "bin"), **env))
            self.assertEqual(r.returncode, rc, r.stdout)
            for w in words:
                self.assertIn(w, r.stdout)


if __name__ == "__main__":
    unittest.main()
