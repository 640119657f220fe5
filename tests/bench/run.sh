#!/bin/sh
# Runs the benchmarks that are built, and the Python ones, each bounded in time; closes with their ratios.
# usage: tests/bench/run.sh BUILD_DIR
#   TOW_BENCH_SECONDS   limit of each benchmark (600)
#   TOW_BENCH_SCRATCH   folder for what is generated (TMPDIR); 2.5 GB are needed for the model, and removed
# A benchmark reports a ratio by a line that begins with "ratio:".
B=$1
limit=${TOW_BENCH_SECONDS:-600}
python=${TOW_PYTHON:-python3}
scratch=$(mktemp -d "${TOW_BENCH_SCRATCH:-${TMPDIR:-/tmp}}/towpath-bench.XXXXXX") || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
failed=0

echo "machine: $(lscpu 2>/dev/null | sed -n 's/^Model name: *//p' | head -n 1), $(nproc) cores, load $(cut -d' ' -f1 /proc/loadavg 2>/dev/null)"
one() { # NAME COMMAND...
    name=$1; shift
    echo; echo "== $name"
    { timeout "$limit" "$@" 2>&1; echo "exit: $?"; } | tee "$scratch/log"
    sed -n "s/^ratio: /  /p" "$scratch/log" >>"$scratch/ratios"
    [ "$(tail -n 1 "$scratch/log")" = "exit: 0" ] || failed=$((failed + 1))
}

for bench in "$B"/bench/bench_*; do
    case $bench in *.d | *.o) continue ;; esac
    [ -x "$bench" ] || continue
    name=$(basename "$bench")
    [ "$name" != bench_capture ] || continue # runs on bench_model's checkpoint
    if [ "$name" = bench_model ]; then
        "$python" tests/support/make_checkpoint.py "$scratch/model" --preset bench || { failed=$((failed + 1)); continue; }
        one "bench_model, one thread" "$bench" "$scratch/model" 1
        one "bench_model, all cores" "$bench" "$scratch/model" 0
        one bench_capture "$B/bench/bench_capture" "$scratch/model"
        rm -rf "$scratch/model"
    else
        one "$name" "$bench"
    fi
done
for bench in tests/bench/*.py; do
    [ -e "$bench" ] && one "$(basename "$bench")" "$python" "$bench" "$B"
done

echo; echo "== ratios to what this machine can do, measured in the same run"
cat "$scratch/ratios" 2>/dev/null
[ "$failed" -eq 0 ] || { echo "$failed benchmarks failed"; exit 1; }
