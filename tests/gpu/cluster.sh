#!/bin/sh
# Three processes with both workers on the device answer as three processes on the CPU do, greedily.
# usage: tests/gpu/cluster.sh BUILD_DIR      (exit 77: no device)
cd "$(dirname "$0")/../.." || exit 1
B=$1
export TOW_BIN=$B/bin
M=deploy/demo-model
work=$(mktemp -d) || exit 1
trap 'TOW_RUN=$work/run sh deploy/local.sh down >/dev/null 2>&1; rm -rf "$work"' EXIT

"$TOW_BIN/towpath-ctl" eval --model $M --device cuda:0 --tokens /dev/null --out "$work/x" 2>"$work/why"
if grep -q 'no CUDA' "$work/why"; then
    cat "$work/why"
    exit 77
fi

ask() { # DEVICE OUT
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    TOW_RUN=$work/run sh deploy/local.sh up --http "127.0.0.1:$port" -- --device "$1" --kv-pages 64 \
        --context-length 8192 || { cat "$work"/run/*.log; exit 1; }
    : >"$2"
    for q in 'What is 17 + 25?' 'Write one sentence about rivers.' \
        "key: alpha-7731, owner: Lena. $(seq -s ' ' 1 400) What is the key? Answer with the key alone."; do
        "$TOW_BIN/towpath-ctl" chat --url "http://127.0.0.1:$port" --temperature 0 --max-tokens 48 "$q" >>"$2" || exit 1
    done
    TOW_RUN=$work/run sh deploy/local.sh down >/dev/null
}
ask cpu "$work/cpu"
ask cuda:0 "$work/cuda"
if ! [ -s "$work/cpu" ] || ! cmp "$work/cpu" "$work/cuda"; then
    echo "the CPU said:"; cat "$work/cpu"; echo "the device said:"; cat "$work/cuda"
    exit 1
fi
cat "$work/cuda"
