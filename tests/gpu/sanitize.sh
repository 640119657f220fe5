#!/bin/sh
# GPU tests under compute-sanitizer's memcheck, racecheck and initcheck; closes with
# 'N passed, N failed'.
# usage: tests/gpu/sanitize.sh BUILD_DIR [TOOL...]
# TOW_SANITIZE_ONLY      part of a name as the lines have it ("racecheck gemm_test 'wkv*'"): only those
# TOW_SANITIZE_JOBS      how many at a time (4)
# TOW_SANITIZE_SECONDS   the limit of each (120; 0: none); one that is cut failed
# TOW_SANITIZE_LOGS      a folder to keep what they printed
# Exit 0 also where there is no device or no compute-sanitizer, with a line; 1 where a case failed or none ran, or the
# device cannot be used; 2 where a setting is wrong.
# A tool makes kernels tens of times slower, so these are the small cases of each test program that
# still take every kernel: all ops by parity_test, and those whose fast kernels want the deployed
# shapes by their own tests.
case " $* " in *" --help "*) sed -n '2,/^# device/s/^# //p' "$0"; exit 0 ;; esac
wrong() { echo "gpu-sanitize: $*" >&2; exit 2; }
whole() { # NAME VALUE MOST, at least 1, or 0 to it where there is a fourth
    case $2 in *[!0-9]* | 0?* | ???????*) ;; *) [ "$2" -le "$3" ] && [ "$2" -ge $((1 - $# / 4)) ] && return ;; esac
    wrong "$1 '$2': must be a whole number, $((1 - $# / 4)) to $3"
}
[ -d "$1" ] || wrong "BUILD_DIR '$1': must be the folder of a build, like build/release"
B=$1; shift
SAN=$(command -v compute-sanitizer || echo "$CUDA_HOME/bin/compute-sanitizer")

# TEST|FILTER|TOOLS (all: the three)|cases of each op, of the 24 (linear: 72) random ones
cases() {
    for op in embed rmsnorm linear linears hc_collapse hc_expand hc_boundary rope_table heads_rope \
        kv_prep window_store compress index_query prepare route moe swiglu ffn add mtp_mix \
        sample; do
        echo "parity|$op|all|6"
    done
    # Hundreds of calls a case, with the cache that is read filled first.
    for op in index_select index_rank attention attend; do
        echo "parity|$op|all|2"
    done
    cat <<'END'
attn|*odd_keys*|all
attn|*not_aligned*|all
attn|*widened_ahead*|memcheck initcheck
attn|*any_length*|memcheck
gemm|wkv*|all
gemm|wo_a*|all
gemm|*groups*|all
gemm|index weights|all
gemm|compressor|all
gemm|gate|all
gemm|odd*|all
gemm|*nvfp4|all
gemm|*begin_early*|all
index|*ragged_rows*|all
index|*equals_and*|all
index|*nan_ranks*|all
index|*chunks_and_drafts*|all
index|*products_of_codes*|all
index|*index_query*|all
index|*odd_scores*|all
launch|*linears*|all
launch|*prepare*|all
moe|* few pairs|all
moe|* many pairs|all
moe|mxfp4 wide scales|all
moe|* tiles|all
moe|layer of other widths|all
norm|*rmsnorm*|all
norm|*heads_rope*|all
norm|*kv_prep*|all
norm|*hc_collapse*|all
norm|*hc_boundary*|all
norm|*hc_expand*|all
norm|*any_pieces*|all
norm|*nan_stays*|all
pages|*move_and_digest*|all
sample|*narrow*|all
sample|*in_a_batch*|all
memory|prefill, fp4 keys|memcheck initcheck
END
}

# Each run with one of the tools named, or with all: five words, each ended by a NUL.
chosen() { # [TOOL...]
    n=0
    cases | while IFS='|' read -r test filter tools quick; do
        n=$((n + 1))
        [ "$tools" = all ] && tools="memcheck racecheck initcheck"
        for tool in $tools; do
            [ $# -eq 0 ] || case " $* " in *" $tool "*) ;; *) continue ;; esac
            case "$tool ${test}_test '$filter'" in *"$TOW_SANITIZE_ONLY"*) ;; *) continue ;; esac
            printf '%s\0' "$tool" "$test" "$filter" "$n" "${quick:-0}"
        done
    done
}

# One run; its line goes to $TOW_SANITIZE_LINES.
if [ "$1" = --one ]; then
    tool=$2 test=$3 filter=$4 n=$5 quick=$6
    log=$TOW_SANITIZE_LOGS/$n-$tool-$test.txt
    begin=$(date +%s)
    # Two cores each, so that the twins' threads do not wait for each other.
    cores=$(nproc); from=$((2 * n % cores))
    set --
    [ "$cores" -le 2 ] || ! command -v taskset >/dev/null ||
        set -- taskset -c $from,$(((from + 1) % cores))
    TOW_TEST_QUICK=$quick timeout "$TOW_SANITIZE_SECONDS" "$@" "$SAN" --tool "$tool" \
        --error-exitcode 99 --print-limit 10 "$B/test/gpu/${test}_test" "$filter" >"$log" 2>&1
    rc=$?
    took=$(($(date +%s) - begin))
    name="$tool ${test}_test '$filter'"
    # Some cases are of one architecture only.
    if { [ $rc -eq 0 ] && ! grep -q '\[       OK \]' "$log"; } || grep -q "^no test is named '" "$log"; then rc=98; fi
    case $rc in
    0) echo "ok   $name, $took s" ;;
    77) echo "skip $name: $(grep -v '^=====' "$log" | tail -n 1)" ;;
    98) echo "skip $name: not on this device" ;;
    124) echo "FAIL $name: not done after $took s" ;;
    *) echo "FAIL $name (exit $rc), $took s"; grep -E -m 40 '=====|FAIL|ERROR' "$log" || tail -n 5 "$log" ;;
    esac >"$TOW_SANITIZE_LINES/$n-$tool"
    cat "$TOW_SANITIZE_LINES/$n-$tool"
    exit 0
fi

for tool; do
    case $tool in
    memcheck | racecheck | initcheck) ;;
    *) wrong "TOOL '$tool': must be memcheck, racecheck or initcheck" ;;
    esac
done
whole TOW_SANITIZE_JOBS "${TOW_SANITIZE_JOBS:=4}" 256
whole TOW_SANITIZE_SECONDS "${TOW_SANITIZE_SECONDS:=120}" 86400 or-none
[ "$(chosen "$@" | wc -c)" -gt 0 ] ||
    wrong "TOW_SANITIZE_ONLY '$TOW_SANITIZE_ONLY': no run of ${*:-the tools} has it in its name, which is like" \
        "\"racecheck gemm_test 'wkv*'\""
kept=$TOW_SANITIZE_LOGS
[ -z "$kept" ] || { mkdir -p "$kept" && [ -w "$kept" ]; } 2>/dev/null ||
    wrong "TOW_SANITIZE_LOGS '$kept': must be a folder to write to, or one that can be made"

if [ ! -x "$B/test/gpu/parity_test" ]; then
    echo "gpu-sanitize: $B was built without CUDA: skipped"
    exit 0
fi
there=$("$B/test/gpu/parity_test" --list 2>&1)
rc=$?
if [ $rc -ne 0 ]; then
    echo "gpu-sanitize: $there$([ $rc -ne 77 ] || echo ": skipped")"
    [ $rc -ne 77 ] || exit 0
    exit $rc
fi
if [ ! -x "$SAN" ]; then
    echo "gpu-sanitize: no compute-sanitizer on PATH or in CUDA_HOME/bin (package cuda-sanitizer-13-0 of NVIDIA's" \
        "repository): skipped"
    exit 0
fi
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
mkdir "$work/lines" "$work/logs"
export TOW_SANITIZE_LINES="$work/lines" TOW_SANITIZE_LOGS="${kept:-$work/logs}" TOW_SANITIZE_SECONDS
chosen "$@" | xargs -0 -r -n 5 -P "$TOW_SANITIZE_JOBS" sh "$0" "$B" --one
count() { cat "$TOW_SANITIZE_LINES"/* 2>/dev/null | grep -c "^$1 "; }
passed=$(count ok); failed=$(count FAIL); skipped=$(count skip)
echo "$passed passed, $failed failed$([ "$skipped" -eq 0 ] || echo ", $skipped skipped")"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
