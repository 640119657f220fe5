#!/usr/bin/env python3
"""Deaths and losses of test_kill.py where pages travel as messages over TCP: there the offer of a page brings the page.
usage: test_kill_tcp.py BUILD_DIR [--all 1] [--rounds N]

Nobody is stopped here: UCX 1.13 may end by itself when it goes on over TCP (docs/operations.md, known limits)."""
import os

os.environ["UCX_TLS"] = "tcp,self"  # before a cluster is started

import harness
import test_kill

if __name__ == "__main__":
    harness.main([test_kill.test_killed_at_each_step, test_kill.test_failed_at_each_step, test_kill.test_killed_at_random],
                 __doc__, test_kill.OPTIONS)
