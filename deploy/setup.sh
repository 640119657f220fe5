# Sourced by demo.sh, test.sh and .ci/run: puts in place what a build, the tests or the fuzzers need.
#
# setup_packages build|test|root|fuzz    compilers and libraries, by apt-get as root; else one line says what to install;
#                              root: what only tests that root runs need
# setup_ucx                    a later UCX in .ucx where the system's is older than 1.13, from PyPI; else one line says so
# setup_venv                   Python clients of the tests in .venv; without PyPI one line says what is skipped
#
# Nothing is asked of the network when everything is there already.

# name of a Debian or Ubuntu package, and how to see that it is there: cmd:COMMAND or inc:HEADER
setup_table() {
    cat <<'T'
build make cmd:make
build gcc cmd:gcc
build libc6-dev inc:stdio.h
build pkg-config cmd:pkg-config
build python3 cmd:python3
build libuv1-dev inc:uv.h
build libnng-dev inc:nng/nng.h
build libcjson-dev inc:cjson/cJSON.h
build libpcre2-dev inc:pcre2.h
build libxxhash-dev inc:xxhash.h
build libucx-dev inc:ucp/api/ucp.h
build libsystemd-dev inc:systemd/sd-daemon.h
test libcmocka-dev inc:cmocka.h
root iproute2 cmd:ip
fuzz clang cmd:clang
T
}

setup_has() { # cmd:COMMAND | inc:HEADER
    case $1 in
    cmd:*) command -v "${1#cmd:}" >/dev/null 2>&1 ;;
    inc:pcre2.h)
        command -v gcc >/dev/null 2>&1 &&
            printf '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\n' | gcc -E - >/dev/null 2>&1 ;;
    inc:cmocka.h)
        command -v gcc >/dev/null 2>&1 &&
            printf '#include <setjmp.h>\n#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <cmocka.h>\n' |
            gcc -E - >/dev/null 2>&1 ;;
    inc:*)
        command -v gcc >/dev/null 2>&1 &&
            printf '#include <%s>\n' "${1#inc:}" | gcc -E - >/dev/null 2>&1 ;;
    esac
}

setup_apt() { # PACKAGE...
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "towpath: missing packages; as root: apt-get install -y --no-install-recommends $*" >&2
        return 1
    fi
    echo "towpath: installing $*"
    setup_log=$(mktemp)
    if apt-get update >"$setup_log" 2>&1 &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >>"$setup_log" 2>&1; then
        rm -f "$setup_log"
    else
        tail -n 20 "$setup_log" >&2; rm -f "$setup_log"
        echo "towpath: apt-get could not install: $*" >&2
        return 1
    fi
}

# The libraries that clang links fuzzers with stand in a package named by clang's version.
setup_fuzzer_library() {
    setup_try=$(mktemp -d)
    echo 'int LLVMFuzzerTestOneInput(const char *p, long n) { return p && n < 0; }' >"$setup_try/t.c"
    setup_links() { clang -fsanitize=fuzzer,address "$setup_try/t.c" -o "$setup_try/t" >/dev/null 2>&1; }
    if ! setup_links; then
        v=$(clang -dumpversion | cut -d. -f1)
        setup_apt "libclang-rt-$v-dev" 2>/dev/null || setup_apt "libclang-common-$v-dev"
    fi
    setup_links
    rc=$?
    rm -rf "$setup_try"
    [ $rc -eq 0 ] || echo "towpath: clang cannot link a fuzzer; libclang-rt-dev for its version is missing" >&2
    return $rc
}

setup_packages() { # KIND...
    missing=
    for kind; do
        while read -r k package sign; do
            [ "$k" = "$kind" ] || continue
            setup_has "$sign" || missing="$missing $package"
        done <<T
$(setup_table)
T
    done
    # shellcheck disable=SC2086
    [ -z "$missing" ] || setup_apt $missing || return 1
    case " $* " in *" build "*) setup_ucx ;; esac
    case " $* " in *" fuzz "*) setup_fuzzer_library ;; esac
}

# Ubuntu 22.04 has a release candidate of 1.12: it ends processes by assertions of its own when a peer dies, and keeps
# others from handling SIGBUS.
setup_ucx() {
    [ -d .ucx/libucx ] && return 0
    setup_old=$(printf '#include <ucp/api/ucp_version.h>\n#if UCP_API_VERSION < UCP_VERSION(1, 13)\nold UCP_API_MAJOR UCP_API_MINOR\n#endif\n' |
        gcc -E -P - 2>/dev/null | sed -n 's/^old *\([0-9]*\) *\([0-9]*\).*/\1.\2/p')
    [ -n "$setup_old" ] || return 0
    python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || setup_apt python3-venv || return 0
    echo "towpath: UCX $setup_old is too old to live through a peer's death; fetching a later one into .ucx"
    setup_log=$(mktemp)
    rm -rf .ucx.part # of an earlier one that was cut short
    if { [ -x .venv/bin/pip ] || python3 -m venv .venv; } >"$setup_log" 2>&1 &&
        timeout 300 .venv/bin/pip install --quiet --disable-pip-version-check --retries 1 --timeout 60 --no-deps \
            --target .ucx.part libucx-cu13==1.22.0 >>"$setup_log" 2>&1; then
        rm -f .ucx.part/libucx/lib/*.a .ucx.part/libucx/lib/ucx/*.a
        mv .ucx.part .ucx
    else
        tail -n 3 "$setup_log" >&2
        rm -rf .ucx.part
        echo "towpath: PyPI gave no UCX; a worker may end when its peer dies (docs/operations.md, \"Which UCX\")" >&2
    fi
    rm -f "$setup_log"
}

setup_venv() {
    want=$(cksum <tests/requirements.txt)
    [ "$(cat .venv/installed 2>/dev/null)" = "$want" ] && return 0
    if ! python3 -c 'import ensurepip, venv' >/dev/null 2>&1; then
        setup_apt python3-venv || { echo "towpath: no python3-venv; tests that need Python clients are skipped" >&2; return 0; }
    fi
    echo "towpath: installing the test clients into .venv; five minutes at most"
    setup_log=$(mktemp)
    if { [ -x .venv/bin/pip ] || python3 -m venv .venv; } >"$setup_log" 2>&1 &&
        timeout 300 .venv/bin/pip install --quiet --disable-pip-version-check --retries 1 --timeout 20 -r tests/requirements.txt >>"$setup_log" 2>&1; then
        echo "$want" >.venv/installed
    else
        tail -n 3 "$setup_log" >&2
        echo "towpath: PyPI gave no test clients; the tests that need them are skipped" >&2
    fi
    rm -f "$setup_log"
}

setup_jobs() { nproc 2>/dev/null || echo 2; }
