/* base/err.c - see err.h. Formatting never allocates,
 * so an error can be told when memory is gone. */
#include "common/base/err.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int tow_fail(struct tow_err *err, int code, const char *fmt, ...)
{
    if (!err) return code;
    va_list ap;
    va_start(ap, fmt);
    err->code = code;
    vsnprintf(err->msg, sizeof err->msg, fmt, ap);
    va_end(ap);
    return code;
}

int tow_note(struct tow_err *err, const char *fmt, ...)
{
    if (!err) return TOW_ESTATE;
    char was[sizeof err->msg];
    va_list ap;
    memcpy(was, err->msg, sizeof was);
    va_start(ap, fmt);
    int n = vsnprintf(err->msg, sizeof err->msg, fmt, ap);
    va_end(ap);
    if (n < 0) n = 0;
    if ((size_t)n < sizeof err->msg)
        snprintf(err->msg + n, sizeof err->msg - (size_t)n, ": %s", was);
    return err->code;
}

const char *tow_err_name(int code)
{
    switch (code) {
    case 0: return "OK";
#define X(name, value, scope, http, text)                                                          \
    case value: return #name;
        TOW_ERR_MAP(X)
#undef X
    default: return "?";
    }
}

const char *tow_err_text(int code)
{
    switch (code) {
    case 0: return "no error";
#define X(name, value, scope, http, text)                                                          \
    case value: return text;
        TOW_ERR_MAP(X)
#undef X
    default: return "unknown error";
    }
}

int tow_err_http(int code)
{
    switch (code) {
    case 0: return 200;
#define X(name, value, scope, http, text)                                                          \
    case value: return http;
        TOW_ERR_MAP(X)
#undef X
    default: return 500;
    }
}

enum tow_scope tow_err_scope(int code)
{
    switch (code) {
#define X(name, value, scope, http, text)                                                          \
    case value: return TOW_SCOPE_##scope;
        TOW_ERR_MAP(X)
#undef X
    default: return TOW_SCOPE_PROCESS;
    }
}

void tow_assert_failed(const char *cond, const char *file, int line)
{
    fprintf(stderr, "towpath: broken invariant: %s (%s:%d)\n", cond, file, line);
    abort();
}
