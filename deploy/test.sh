#!/bin/sh
# Sets a fresh machine up, builds, and runs all tests; closes with 'N passed, N failed'.
cd "$(dirname "$0")/.." || exit 1
. deploy/setup.sh
# shellcheck disable=SC2046
setup_packages build test $([ "$(id -u)" -ne 0 ] || echo root) || exit 1
setup_venv
echo "towpath: building; a few minutes"
make -s -j"$(setup_jobs)" all tests-build || exit 1
exec make -s test
