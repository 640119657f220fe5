#!/bin/sh
# A local cluster for people and tests.
#
#   deploy/local.sh up [--model DIR] [--prefill N] [--decode N] [--http ADDR:PORT] [--control URL]
#                      [--prefill-device D,...] [--decode-device D,...] [-- more flags]
#   deploy/local.sh status
#   deploy/local.sh down
#
# Logs and process ids lie in .run/ of the repository (TOW_RUN names another folder, for a second cluster).
# `more flags` go to each program that has a flag of that name. Of several devices each worker of a role takes the
# next one, after the last the first again: --prefill-device cuda:0 --decode 2 --decode-device cuda:1,cuda:2.
# Paths count from the caller's folder. `status` says where more workers may join (--join). `down` ends exactly the
# processes that `up` started.
ROOT=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd) || exit 1
BIN=${TOW_BIN:-$ROOT/build/release/bin}
RUN=${TOW_RUN:-$ROOT/.run}
READY_S=${TOW_READY_S:-120}  # how long `up` waits for /ready
DRAIN_S=${TOW_DRAIN_S:-70}   # how long `down` waits before a second signal
MAX_WORKERS=64               # RTR_MAX_WORKERS of router/registry.h
stop=                        # the exit status of an `up` that a signal ended

die() { printf 'local.sh: %s\n' "$*" >&2; exit 1; }

usage() {
    sed -n '2,13s/^# \{0,1\}//p' "$ROOT/deploy/local.sh" >&2
    exit 2
}

# A number has one spelling: the shell would take 010 for 8.
whole() { # NAME VALUE LEAST MOST
    case $2 in
    '' | *[!0-9]* | 0?* | ??????*) ;;
    *) [ "$2" -ge "$3" ] && [ "$2" -le "$4" ] && return ;;
    esac
    die "$1: '$2' is not right; must be a whole number, $3 to $4"
}

# Devices of a role's workers: `cpu` or `cuda:N`, one or several; the worker itself says which there are.
devices() { # FLAG VALUE
    case ,$2, in
    *,,*) die "$1: '$2' has an empty device; must be devices with commas between, like cpu or cuda:0,cuda:1" ;;
    esac
}

# A device more than there are workers would vanish silently.
no_device_left() { # FLAG D,... WORKERS ROLE
    commas=$(printf %s "$2" | tr -cd ,)
    [ ${#commas} -lt "$3" ] || die "$1: '$2' has $((${#commas} + 1)) devices, more than --$4 has workers ($3)"
}

# The device of worker I, by turns; nothing if none is named.
device_of() { # I D,...
    [ -n "$2" ] || return 0
    # Before the words are made: a device is no pattern of file names.
    set -f; IFS=,
    # shellcheck disable=SC2086
    set -- "$1" $2
    set +f; unset IFS
    shift $(($1 % ($# - 1) + 1))
    printf '%s\n' "$1"
}

# When the process began, in clock ticks: with the pid it names one process for ever.
birth() { # PID
    sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20
}

alive() { # PID BIRTH
    [ -n "$2" ] && [ "$(birth "$1")" = "$2" ] && ! grep -q '^State:[[:space:]]*Z' "/proc/$1/status" 2>/dev/null
}

free_ports() { # N
    python3 -c 'import socket, sys
s = [socket.socket() for _ in range(int(sys.argv[1]))]
for x in s: x.bind(("127.0.0.1", 0))
print(*[x.getsockname()[1] for x in s])' "$1"
}

# The body of a GET, if the answer is 200.
get() { # ADDR:PORT PATH
    python3 -c 'import http.client, sys
try:
    c = http.client.HTTPConnection(sys.argv[1], timeout=5)
    c.request("GET", sys.argv[2])
    r = c.getresponse()
    sys.stdout.write(r.read().decode())
    sys.exit(r.status != 200)
except OSError:
    sys.exit(1)' "$1" "$2"
}

# Starts one program with its own flags (up to --) and those of the rest that it knows.
# (Names end in _: a shell function has no variables of its own.)
start() { # NAME PROGRAM FLAG... -- MORE...
    name_=$1; program_=$BIN/$2; shift 2
    own_=0
    for a_; do [ "$a_" = -- ] && break; own_=$((own_ + 1)); done
    n_=$#; i_=0; keep_=1
    help_=$("$program_" --help) || { check_stop; down >/dev/null; die "$program_ --help failed"; }
    while [ $i_ -lt "$n_" ]; do
        a_=$1; shift
        if [ $i_ -gt $own_ ]; then
            case $a_ in
            --*) keep_=0
                printf '%s\n' "$help_" | grep -q -e "^  ${a_%%=*}\( \|\$\)" && keep_=1 ;;
            esac
            [ $keep_ -eq 1 ] && set -- "$@" "$a_"
        elif [ $i_ -lt $own_ ]; then
            set -- "$@" "$a_"
        fi
        i_=$((i_ + 1))
    done
    setsid "$program_" "$@" >"$RUN/$name_.log" 2>&1 </dev/null &
    echo "$name_ $! $(birth $!) $status_" >>"$RUN/processes"
    check_stop
}

# After a signal what `up` has started must not stay.
check_stop() {
    [ -n "$stop" ] || return 0
    down >/dev/null
    exit "$stop"
}

# A flag that no program knows would vanish silently, so it is refused; so is one whose value this script
# has to know or makes itself.
check_more() { # MORE...
    for a; do
        case $a in
        --*) flag=${a%%=*}; known=0
            case $flag in
            --model | --http | --control) die "$flag after --: the script has to know it; give it before --" ;;
            --join | --status) die "$flag after --: the script gives each worker its own; --control says where workers join" ;;
            --check-config | --help | --version) die "$flag after --: with it a program ends at once; call the program itself" ;;
            esac
            for p in router prefill decode; do
                "$BIN/towpath-$p" --help | grep -q -e "^  $flag\( \|\$\)" && known=1
            done
            [ $known -eq 1 ] || die "no program knows $flag" ;;
        esac
    done
}

up() {
    model=$ROOT/deploy/demo-model; n_prefill=1; n_decode=1; http=127.0.0.1:8000; control=
    prefill_devices=; decode_devices=
    while [ $# -gt 0 ]; do
        case $1 in
        --model | --prefill | --decode | --http | --control | --prefill-device | --decode-device)
            [ $# -ge 2 ] || die "$1 needs a value"
            case $1 in
            --model) model=$2 ;;
            --prefill) n_prefill=$2 ;;
            --decode) n_decode=$2 ;;
            --http) http=$2 ;;
            --prefill-device) devices "$1" "$2"; prefill_devices=$2 ;;
            --decode-device) devices "$1" "$2"; decode_devices=$2 ;;
            --control) control=$2; [ -n "$2" ] || die "--control is empty; must be tcp://ADDR:PORT or ipc:///PATH" ;;
            esac
            shift 2 ;;
        --) shift; break ;;
        -h | --help) usage ;;
        *) die "'$1': unknown to up, which has --model, --prefill, --decode, --http, --control, --prefill-device, --decode-device; a program's own flags come after --" ;;
        esac
    done
    # At least one of each role, or nothing is ever ready; a router takes MAX_WORKERS.
    whole --prefill "$n_prefill" 1 $((MAX_WORKERS - 1))
    whole --decode "$n_decode" 1 $((MAX_WORKERS - n_prefill))
    no_device_left --prefill-device "$prefill_devices" "$n_prefill" prefill
    no_device_left --decode-device "$decode_devices" "$n_decode" decode
    case $http in *:0) die "--http $http: clients and this script need a port they know, 1 to 65535" ;; esac
    case $control in
    *,*) die "--control $control: a local cluster has one router; must be one URL" ;;
    tcp://*:0) die "--control $control: workers need a port they know, 1 to 65535" ;;
    esac
    [ -d "$model" ] || die "--model: $model is not a folder"
    for p in router prefill decode; do [ -x "$BIN/towpath-$p" ] || die "$BIN/towpath-$p is missing; run make"; done
    if [ -e "$RUN/processes" ]; then
        while read -r name pid b rest; do alive "$pid" "$b" && die "$name runs already (pid $pid); try: deploy/local.sh down"; done <"$RUN/processes"
    fi
    check_more "$@"
    for a; do
        case $prefill_devices$decode_devices:$a in
        :*) ;;
        *:--device | *:--device=*) die "--device after -- beside --prefill-device or --decode-device: name a worker's device once" ;;
        esac
    done
    mkdir -p "$RUN" || exit 1
    trap 'stop=129' HUP
    trap 'stop=130' INT
    trap 'stop=143' TERM
    : >"$RUN/processes"
    echo "$http" >"$RUN/http"
    # shellcheck disable=SC2046
    set -- $(free_ports $((1 + n_prefill + n_decode))) -- "$@"
    control=${control:-tcp://127.0.0.1:$1}; shift
    echo "$control" >"$RUN/control"
    ports=; while [ "$1" != -- ]; do ports="$ports $1"; shift; done
    shift
    status_=-
    start router towpath-router --model "$model" --http "$http" --control "$control" -- "$@"
    for role in prefill decode; do
        n=$n_prefill; devices=$prefill_devices
        [ $role = decode ] && n=$n_decode && devices=$decode_devices
        i=0
        while [ $i -lt "$n" ]; do
            port=${ports# }; port=${port%% *}; ports=${ports# }; ports=${ports#"$port"}
            status_=127.0.0.1:$port
            device=$(device_of "$i" "$devices")
            # shellcheck disable=SC2086
            start "$role-$i" "towpath-$role" --model "$model" --name "$role-$i" --join "$control" \
                --status "$status_" ${device:+--device "$device"} -- "$@"
            i=$((i + 1))
        done
    done
    wait_ready
}

# Ends the start when a process has ended or a router has refused a worker: waiting would not help.
check_started() {
    while read -r name pid b rest; do
        why=
        alive "$pid" "$b" || why=ended
        refusal=$(grep -m 1 ' refuses: ' "$RUN/$name.log")
        [ -n "$refusal" ] && why='was refused'
        [ -n "$why" ] || continue
        check_stop
        if [ -n "$refusal" ]; then echo "$refusal"; else tail -n 5 "$RUN/$name.log"; fi >&2
        if [ -s "$RUN/$name.log" ]; then log='its last lines are above'; else log="its log $RUN/$name.log is empty"; fi
        why="$name $why; $log"  # `down` reads names too
        down >/dev/null
        die "$why"
    done <"$RUN/processes"
}

# Every worker says that a router has welcomed it. Ours alone can: its control port is this start's own,
# while another router may hold the HTTP port and be ready.
welcome() {
    while read -r name pid b addr; do
        [ "$addr" = - ] || get "$addr" /ready >/dev/null || return 1
    done <"$RUN/processes"
}

wait_ready() {
    end=$(($(date +%s) + READY_S))
    until welcome && get "$http" /ready >/dev/null; do
        check_stop
        check_started
        if [ "$(date +%s)" -ge $end ]; then
            while read -r name rest; do
                echo "==> $RUN/$name.log" >&2
                tail -n 5 "$RUN/$name.log" >&2
            done <"$RUN/processes"
            down >/dev/null
            die "not ready within $READY_S s; the last log lines are above"
        fi
        sleep 0.1
    done
    check_started
    check_stop
    echo "ready at http://$http"
}

status() {
    [ -s "$RUN/processes" ] || { echo "not running"; exit 3; }
    rc=0; router=1
    while read -r name pid b rest; do
        if alive "$pid" "$b"; then
            echo "$name: running, pid $pid, log $RUN/$name.log"
        else
            echo "$name: ended, log $RUN/$name.log"; rc=1
            [ "$name" = router ] && router=0
        fi
    done <"$RUN/processes"
    http=$(cat "$RUN/http")
    [ $router -eq 1 ] && echo "workers join at $(cat "$RUN/control")"
    # Without our router whoever answers there is another's.
    if [ $router -eq 1 ] && get "$http" /ready >/dev/null; then echo "ready at http://$http"; else echo "not ready at http://$http"; rc=1; fi
    exit $rc
}

# Sends the signal to those of the role that still run, then waits until all have ended or time is up.
end_role() { # PATTERN SIGNAL SECONDS
    end=$(($(date +%s) + $3))
    while read -r name pid b rest; do
        # shellcheck disable=SC2254
        case $name in $1) alive "$pid" "$b" && kill -s "$2" "$pid" ;; esac
    done <"$RUN/processes"
    while :; do
        left=0
        while read -r name pid b rest; do
            # shellcheck disable=SC2254
            case $name in $1) alive "$pid" "$b" && left=$((left + 1)) ;; esac
        done <"$RUN/processes"
        [ $left -eq 0 ] && return 0
        [ "$(date +%s)" -ge $end ] && return 1
        sleep 0.05
    done
}

# The router goes first: it lets streams end, which needs the workers.
down() {
    [ -e "$RUN/processes" ] || { echo "not running"; return 0; }
    for part in 'router' '*-*'; do
        end_role "$part" TERM "$DRAIN_S" || end_role "$part" TERM 10 || end_role "$part" KILL 10
    done
    rm -f "$RUN/processes" "$RUN/http" "$RUN/control"
    echo "stopped"
}

whole TOW_READY_S "$READY_S" 0 99999
whole TOW_DRAIN_S "$DRAIN_S" 0 99999
command=$1
[ $# -gt 0 ] && shift
case $command in
up) up "$@" ;;
status) status ;;
down) down ;;
*) usage ;;
esac
