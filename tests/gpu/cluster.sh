#!/bin/sh
# Three processes with both workers on the device, and where there is a second one with a device each, answer as
# three processes on the CPU do, greedily; and with bf16 index keys a prompt of 32K tokens finds the memory that
# was planned for it.
# usage: tests/gpu/cluster.sh BUILD_DIR
# TOW_TEST_DEVICE     cuda:0
# TOW_TEST_DEVICE2    cuda:1, if it is there; one that is named must be
# Exit 77 where there is no such device, 2 where a setting is wrong; each after a line.
cd "$(dirname "$0")/../.." || exit 1
B=$1
D=${TOW_TEST_DEVICE:-cuda:0}
D2=${TOW_TEST_DEVICE2:-cuda:1}
export TOW_BIN="$B/bin"
if [ ! -x "$TOW_BIN/towpath-ctl" ]; then
    echo "cluster.sh: BUILD_DIR '$B': must be the folder of a build with its programs, like build/release"
    exit 2
fi
M=deploy/demo-model
work=$(mktemp -d) || exit 1
trap 'TOW_RUN=$work/run sh deploy/local.sh down >/dev/null 2>&1; rm -rf "$work"' EXIT

there() { # VARIABLE DEVICE: 0; 2 where the name is wrong, 77 where the machine has none, with a line in $work/said
    "$TOW_BIN/towpath-ctl" eval --model $M --device "$2" --tokens /dev/null --out "$work/x" >"$work/why" 2>&1
    sed -n 's/^.*device .*: must be/must be/p; /no CUDA/p; /compute capability/p' "$work/why" >"$work/found"
    [ -s "$work/found" ] || return 0
    case $(cat "$work/found") in
    'must be '*) status=2; printf "%s '%s': " "$1" "$2" >"$work/said" ;;
    *) status=77; : >"$work/said" ;;
    esac
    cat "$work/found" >>"$work/said"
    return $status
}
# Both before anything is run: a wrong setting is told at once.
there TOW_TEST_DEVICE "$D" || { status=$?; cat "$work/said"; exit $status; }
second=1
there TOW_TEST_DEVICE2 "$D2" || {
    status=$?
    [ -z "$TOW_TEST_DEVICE2" ] || { cat "$work/said"; exit $status; }
    second=
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
ask() { # PREFILL-DEVICE DECODE-DEVICE OUT
    port=$(free_port)
    TOW_RUN=$work/run sh deploy/local.sh up --http "127.0.0.1:$port" --prefill-device "$1" --decode-device "$2" -- \
        --kv-pages 64 --context-length 8192 || { cat "$work"/run/*.log 2>/dev/null; exit 1; }
    chunk=$(python3 -c 'import json, sys, urllib.request
workers = json.load(urllib.request.urlopen(sys.argv[1]))
print(next(w["capacity"]["chunk_tokens"] for w in workers if w["role"] == "prefill"))' \
        "http://127.0.0.1:$port/admin/workers")
    case $1,$chunk in
    cuda:*,8192 | *:cpu,512 | cpu,512) ;;
    *) echo "a prefill worker on $1 has chunks of '$chunk'"; exit 1 ;;
    esac
    : >"$3"
    for q in 'What is 17 + 25?' 'Write one sentence about rivers.' \
        "key: alpha-7731, owner: Lena. $(seq -s ' ' 1 400) What is the key? Answer with the key alone."; do
        "$TOW_BIN/towpath-ctl" chat --url "http://127.0.0.1:$port" --temperature 0 --max-tokens 48 "$q" >>"$3" || exit 1
    done
    TOW_RUN=$work/run sh deploy/local.sh down >/dev/null
}
same() { # DEVICES OUT
    [ -s "$work/cpu" ] && cmp "$work/cpu" "$2" && return
    echo "the CPU said:"; cat "$work/cpu"; echo "$1 said:"; cat "$2"
    exit 1
}
ask cpu cpu "$work/cpu"
ask "$D" "$D" "$work/cuda"
same "$D" "$work/cuda"
cat "$work/cuda"

if [ -z "$second" ]; then
    echo "$D2 is not there: prefill and decode on a device each not tried"
else
    ask "$D" "$D2" "$work/two"
    same "prefill on $D and decode on $D2" "$work/two"
    echo "the same by prefill on $D and decode on $D2"
fi

# Half of the context that was planned for, twice beside each other.
port=$(free_port)
TOW_RUN=$work/run sh deploy/local.sh up --http "127.0.0.1:$port" -- --device "$D" --index-keys bf16 \
    --memory-fraction 0.05 --context-length 65536 --chunk-tokens 4096 || { cat "$work"/run/*.log 2>/dev/null; exit 1; }
long() { # OUT
    "$TOW_BIN/towpath-ctl" chat --url "http://127.0.0.1:$port" --temperature 0 --max-tokens 24 --stats \
        "key: alpha-7731, owner: Lena. $(seq -s ' ' 1 8600) What is the key? Answer with the key alone." >"$1" 2>"$1.stats"
}
long "$work/long1" & other=$!
long "$work/long2" || { cat "$work"/long2.stats "$work"/run/*.log; exit 1; }
wait $other || { cat "$work"/long1.stats "$work"/run/*.log; exit 1; }
cat "$work/long2" "$work/long2.stats"
grep -h 'stay free' "$work"/run/*.log
n=$(sed -n 's/^prompt \([0-9]*\) tokens.*/\1/p' "$work/long2.stats")
[ "${n:-0}" -ge 32000 ] || { echo "the prompt had $n tokens, not 32000"; exit 1; }
[ -s "$work/long2" ] && cmp "$work/long1" "$work/long2" || { echo "one said:"; cat "$work/long1"; exit 1; }
