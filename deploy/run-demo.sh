#!/bin/sh
# `make demo`: a cluster of one prefill and one decode worker, one question, the streamed answer, all stopped.
# DEVICE=cuda:0, or TOW_DEVICE, runs both on that device: make demo DEVICE=cuda:0.
cd "$(dirname "$0")/.." || exit 1
if [ -n "$DEVICE" ] && [ "${TOW_DEVICE:-$DEVICE}" != "$DEVICE" ]; then
    echo "run-demo.sh: DEVICE '$DEVICE' and TOW_DEVICE '$TOW_DEVICE': must be the same" >&2
    exit 2
fi
device=${TOW_DEVICE:-${DEVICE:-cpu}}
TOW_RUN=$(mktemp -d) || exit 1
export TOW_RUN
stop() {
    sh deploy/local.sh down >/dev/null
    rm -rf "$TOW_RUN"
}
trap 'stop; exit 130' INT
trap 'stop; exit 143' TERM
fail() { stop; exit 1; }

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])') || exit 1
echo "starting router, prefill and decode on $device"
sh deploy/local.sh up --http "127.0.0.1:$port" -- --device "$device" || fail

question='production:
  billing-api:
    port: 8443
    deploy_token: tk_7h2m9qxa
    owner: Nina Vogel
  cart-worker:
    port: 9107
    deploy_token: amber-otter-5521
staging:
  billing-api:
    port: 18443
    deploy_token: tk_p04zzn1e
    owner: Karim Diaz

What is the deploy token of billing-api in production?'
echo
printf '%s\n' "$question" | sed 's/^/  > /'
echo
"${TOW_BIN:-build/release/bin}/towpath-ctl" chat --url "http://127.0.0.1:$port" --temperature 0 --max-tokens 200 --stats "$question" || fail
echo
stop
