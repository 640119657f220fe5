#!/bin/sh
# Runs the built tests of the kinds named and closes with 'N passed, N failed'. Exit 77 of a test: skipped.
# usage: tests/run.sh BUILD_DIR KIND...      (KIND: unit kernels golden fault cluster)
B=$1; shift
passed=0; failed=0
log=$(mktemp); trap 'rm -f "$log"' EXIT
one() { # NAME COMMAND...
    name=$1; shift
    if "$@" >"$log" 2>&1; then
        passed=$((passed + 1)); echo "ok   $name"
        sed -n 's/^no \(.*\)/skip no \1/p' "$log" | sort -u
    else
        rc=$?
        if [ "$rc" -eq 77 ]; then
            echo "skip $name: $(tail -n 1 "$log")"
        else
            failed=$((failed + 1)); echo "FAIL $name (exit $rc)"; tail -n 60 "$log"
        fi
    fi
}
for kind; do
    if [ "$kind" = cluster ]; then
        for t in tests/cluster/test_*.py; do
            [ -e "$t" ] || continue
            one "$t" timeout 900 "${TOW_PYTHON:-python3}" "$t" "$B"
        done
    else
        for t in "$B/test/$kind"/*_test; do
            [ -e "$t" ] && one "$kind/$(basename "$t")" timeout 900 "$t"
        done
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
