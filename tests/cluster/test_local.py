#!/usr/bin/env python3
"""deploy/local.sh: `up` is ready only when its own cluster is, and a start that cannot succeed ends at once.

usage: test_local.py BUILD_DIR
"""
import os
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

    def sh(self, *args, run="a", ready_s=100):
        env = dict(ENV, TOW_BIN=os.path.join(BUILD, "bin"), TOW_RUN=os.path.join(self.dir.name, run),
                   TOW_READY_S=str(int(ready_s * harness.SLACK)))
        return subprocess.run(["sh", SCRIPT, *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              stdin=subprocess.DEVNULL, text=True)

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
        nobody = "tcp://127.0.0.1:%d" % harness.free_port()
        r = self.sh("up", "--http", "127.0.0.1:%d" % harness.free_port(), "--", "--join", nobody, ready_s=0)
        self.failed(r, "a", "not ready within 0 s", "router.log", "decode-0.log")
        self.assertNotIn("earlier", r.stdout)


if __name__ == "__main__":
    unittest.main()
