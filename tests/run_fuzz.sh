#!/bin/sh
# Runs every fuzzer for some seconds, from a copy of its seeds, and closes with 'N passed, N failed'.
# usage: tests/run_fuzz.sh BUILD_DIR SECONDS     (an input that fails is kept under BUILD_DIR/failed)
B=$1; seconds=$2
passed=0; failed=0
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
for f in "$B"/fuzz/fuzz_*; do
    [ -x "$f" ] || continue
    name=$(basename "$f"); what=${name#fuzz_}
    mkdir -p "$work/$what" "$B/failed"
    [ -d "tests/fuzz/corpus/$what" ] && cp -r "tests/fuzz/corpus/$what/." "$work/$what"
    # Deadly slow inputs count as failures too; memory is capped so that a hostile length is noticed.
    if "$f" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -artifact_prefix="$B/failed/$what-" \
        "$work/$what" >"$work/log" 2>&1; then
        passed=$((passed + 1)); echo "ok   fuzz/$what ($(sed -n 's/^Done \([0-9]* runs\).*/\1/p' "$work/log"))"
    else
        rc=$?; failed=$((failed + 1)); echo "FAIL fuzz/$what (exit $rc)"; tail -n 60 "$work/log"
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
