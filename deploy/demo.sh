#!/bin/sh
# Sets a fresh machine up, builds, and runs the demo: one question through router, prefill and decode.
cd "$(dirname "$0")/.." || exit 1
. deploy/setup.sh
setup_packages build || exit 1
echo "towpath: building; a few minutes"
make -s -j"$(setup_jobs)" all || exit 1
exec make -s demo
