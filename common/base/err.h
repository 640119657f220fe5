/* base/err.h - error codes, the error record that travels up, and assertions.
 *
 * Why      One table says for each code its name, what has to be abandoned (scope), the HTTP status
 *          the router answers with, and a line of text.
 * Rules    Functions return 0 or a negative TOW_E*. Whoever first knows what went wrong fills the
 *          record with tow_fail(); callers pass it up. Whoever ends the request logs it, once.
 */
#ifndef TOW_BASE_ERR_H
#define TOW_BASE_ERR_H

#include <stdarg.h>
#include <stddef.h>

/* What must be given up when this error occurs. */
enum tow_scope { TOW_SCOPE_REQUEST, TOW_SCOPE_LINK, TOW_SCOPE_PROCESS };

/* X(name, value, scope, http, text) */
/* clang-format off */
#define TOW_ERR_MAP(X)                                                              \
    X(EINVAL,   -1,  REQUEST, 400, "invalid value")                                 \
    X(EFULL,    -2,  REQUEST, 429, "no pages or slots free")                        \
    X(EBUSY,    -3,  REQUEST, 503, "no capacity now")                               \
    X(EWIRE,    -4,  LINK,    502, "peer broke the protocol")                       \
    X(EDEVICE,  -5,  PROCESS, 500, "device error; its state is unknown")            \
    X(ENOMEM,   -6,  REQUEST, 503, "out of memory")                                 \
    X(EPEER,    -7,  LINK,    502, "peer lost or failed")                           \
    X(ETIME,    -8,  REQUEST, 504, "deadline passed")                               \
    X(ECANCEL,  -9,  REQUEST, 499, "cancelled")                                     \
    X(EIO,      -10, PROCESS, 500, "input or output failed")                        \
    X(EFORMAT,  -11, PROCESS, 400, "malformed file or text")                        \
    X(EMISMATCH,-12, LINK,    409, "peers do not fit together")                     \
    X(ENOENT,   -13, REQUEST, 404, "not found")                                     \
    X(EAUTH,    -14, LINK,    401, "not allowed")                                   \
    X(ETOOBIG,  -15, REQUEST, 413, "larger than its limit")                         \
    X(EDRAIN,   -16, REQUEST, 503, "draining")                                      \
    X(EDIGEST,  -17, REQUEST, 502, "digest of a page differs")                      \
    X(ENUMERIC, -18, REQUEST, 500, "no finite value to choose from")                \
    X(ESTATE,   -19, REQUEST, 500, "not legal in this state")                       \
    X(EAGAIN,   -20, REQUEST, 503, "not finished; call again")                      \
    X(ESYS,     -21, PROCESS, 500, "system call failed")                            \
    X(ECONFIG,  -22, PROCESS, 400, "bad configuration")
/* clang-format on */

enum tow_code {
    TOW_OK = 0,
#define X(name, value, scope, http, text) TOW_##name = value,
    TOW_ERR_MAP(X)
#undef X
};

/* Message holds one lower-case line, ids first. Always terminated; cut when too long. */
struct tow_err {
    int code; /* 0 or TOW_E* */
    char msg[600];
};

/* Fills *err (NULL is fine) and returns code, so that `return tow_fail(...)` reads well. */
int tow_fail(struct tow_err *err, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "what: " before the message that is there already; returns err's code. */
int tow_note(struct tow_err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

const char *tow_err_name(int code);     /* "EFULL"; "?" when unknown; static */
const char *tow_err_text(int code);     /* the table's line; static */
int tow_err_http(int code);             /* 500 when unknown */
enum tow_scope tow_err_scope(int code); /* PROCESS when unknown */

/* Guards our own invariants, in release builds too. Foreign bytes never reach one. */
#define tow_assert(cond) ((cond) ? (void)0 : tow_assert_failed(#cond, __FILE__, __LINE__))
__attribute__((noreturn)) void tow_assert_failed(const char *cond, const char *file, int line);

#endif
