#!/bin/sh
# Runs the built tests of the kinds named and closes with 'N passed, N failed', and
# ', N skipped' if any were.
# usage: tests/run.sh BUILD_DIR KIND...      (KIND: unit kernels golden fault gpu cluster)
# TOW_SKIP: names (kind/name) left out here, with a line that says so.
# TOW_TEST_DEVICE: what tests of devices run on (kind gpu: cuda:0; other kinds: cpu).
# A test that exits 77 is skipped: something it needs is not there, and its last line says what.
# Exit 1 where a test failed or none ran, 2 where BUILD_DIR or KIND is wrong.
wrong() { echo "run.sh: $*" >&2; exit 2; }
[ -d "$1" ] || wrong "BUILD_DIR '$1': must be the folder of a build, like build/release"
B=$1; shift
for kind; do
    case $kind in
    unit | kernels | golden | fault | gpu | cluster) ;;
    *) wrong "KIND '$kind': must be unit, kernels, golden, fault, gpu or cluster" ;;
    esac
done
if [ -z "$TOW_PYTHON" ]; then
    TOW_PYTHON=python3
    [ -x .venv/bin/python3 ] && TOW_PYTHON=.venv/bin/python3
fi
case $B in
*asan | *tsan) # UCX's malloc hooks and the sanitizers' do not agree
    export UCX_MEM_EVENTS=n TSAN_OPTIONS="suppressions=tests/tsan.supp $TSAN_OPTIONS" \
        LSAN_OPTIONS="suppressions=tests/lsan.supp:print_suppressions=0 $LSAN_OPTIONS" ;;
esac
# Limits in tests guard against hanging, not against a busy machine.
export TOW_TEST_SLACK="${TOW_TEST_SLACK:-4}"
passed=0; failed=0; skipped=0
log=$(mktemp); trap 'rm -f "$log"' EXIT
one() { # NAME COMMAND...
    name=$1; shift
    "$@" >"$log" 2>&1
    rc=$?
    if [ $rc -eq 0 ]; then
        passed=$((passed + 1)); echo "ok   $name"
        sed -n 's/^no \(.*\)/skip no \1/p' "$log" | sort -u
    elif [ $rc -eq 77 ]; then
        skipped=$((skipped + 1)); echo "skip $name: $(tail -n 1 "$log")"
    else
        failed=$((failed + 1)); echo "FAIL $name (exit $rc)"; tail -n 60 "$log"
    fi
}
for kind; do
    if [ "$kind" = cluster ]; then
        for t in tests/cluster/test_*.py; do
            [ -e "$t" ] || continue
            one "$t" timeout 1800 "$TOW_PYTHON" "$t" "$B"
        done
    else
        for t in "$B/test/$kind"/*_test; do
            [ -e "$t" ] || continue
            case " $TOW_SKIP " in
            *" $kind/$(basename "$t") "*) skipped=$((skipped + 1)); echo "skip $kind/$(basename "$t"): too slow in this build" ;;
            *) one "$kind/$(basename "$t")" timeout 900 "$t" ;;
            esac
        done
    fi
    # Goldens and draws on the device, and three processes on it.
    if [ "$kind" = gpu ]; then
        device=${TOW_TEST_DEVICE:-cuda:0}
        one gpu/cluster timeout 600 sh tests/gpu/cluster.sh "$B"
        for t in kernels/unit_golden kernels/trace_golden golden/block golden/rank golden/eval golden/smoke unit/model_forward; do
            [ -e "$B/test/${t}_test" ] || continue
            one "${t}_test on $device" env "TOW_TEST_DEVICE=$device" timeout 900 "$B/test/${t}_test"
        done
        for t in golden/block golden/rank golden/eval golden/smoke; do # --products fp8
            [ -e "$B/test/${t}_test" ] || continue
            one "${t}_test on $device by codes" env "TOW_TEST_DEVICE=$device" TOW_TEST_PRODUCTS=fp8 \
                timeout 900 "$B/test/${t}_test"
        done
    fi
done
echo "$passed passed, $failed failed$([ $skipped -eq 0 ] || echo ", $skipped skipped")"
[ "$failed" -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
