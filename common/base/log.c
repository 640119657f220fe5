/* base/log.c - see log.h. The line is built on the stack and cut at its end,
 * so logging never allocates. */
#include "common/base/log.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    LINE_BYTES = 2048,
    END_BYTES = 32
}; /* END_BYTES: room for what ends a line; a line is below PIPE_BUF */

static const char *log_program = "towpath";
static enum tow_log_level log_level = TOW_LOG_INFO;
static enum tow_log_format log_format = TOW_LOG_TEXT;
static pthread_mutex_t write_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned lost_lines; /* since the last that was written; under write_lock */

const char *const tow_log_levels[] = {"error", "warn", "info", "debug", NULL};
const char *const tow_log_formats[] = {"text", "json", NULL};

void tow_log_init(const char *program, enum tow_log_level level, enum tow_log_format format)
{
    log_program = program;
    log_level = level;
    log_format = format;
}

int tow_log_enabled(enum tow_log_level level)
{
    return level <= log_level;
}

/* Length of the valid UTF-8 sequence at s (1..4), or 0. */
static size_t utf8_len(const unsigned char *s, size_t left)
{
    unsigned c = s[0];
    size_t n = c < 0x80                ? 1
               : c >= 0xc2 && c < 0xe0 ? 2
               : c >= 0xe0 && c < 0xf0 ? 3
               : c >= 0xf0 && c < 0xf5 ? 4
                                       : 0;
    if (n == 0 || n > left) return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if (n == 3 && ((c == 0xe0 && s[1] < 0xa0) || (c == 0xed && s[1] > 0x9f))) return 0;
    if (n == 4 && ((c == 0xf0 && s[1] < 0x90) || (c == 0xf4 && s[1] > 0x8f))) return 0;
    return n;
}

bool tow_char_commands(const char *text, size_t n)
{
    const unsigned char *s = (const unsigned char *)text;
    if (n == 1) return s[0] < 0x20 || s[0] == 0x7f;
    if (n == 2) return s[0] == 0xc2 && s[1] < 0xa0;
    return n == 3 && s[0] == 0xe2 &&
           ((s[1] == 0x80 && s[2] >= 0xa8 && s[2] <= 0xae) || /* U+2028 to U+202E */
            (s[1] == 0x81 && s[2] >= 0xa6 && s[2] <= 0xa9));  /* U+2066 to U+2069 */
}

size_t tow_char_len(const char *text, size_t left)
{
    return left ? utf8_len((const unsigned char *)text, left) : 0;
}

/* Copies src to dst with foreign bytes made harmless; returns the length written, below cap. */
static size_t copy_clean(char *dst, size_t cap, const char *src, int json)
{
    size_t o = 0, n = strlen(src);
    for (size_t i = 0; i < n;) {
        const unsigned char *s = (const unsigned char *)src + i;
        size_t k = utf8_len(s, n - i);
        const bool foreign = k == 0 || tow_char_commands(src + i, k);
        if (o + (foreign ? 5 * (k ? k : 1) : 4) + 4 >= cap) break;
        if (foreign) {
            const size_t end = i + (k ? k : 1);
            for (; i < end; i++)
                o += (size_t)snprintf(dst + o, cap - o, json ? "\\\\x%02x" : "\\x%02x",
                                      (unsigned char)src[i]);
        } else {
            if (json && (s[0] == '"' || s[0] == '\\')) dst[o++] = '\\';
            memcpy(dst + o, s, k);
            o += k;
            i += k;
        }
    }
    return o;
}

/* A full pipe that nobody reads must not stop the server: the line is dropped, and the next one
 * says so. The lock keeps another thread from taking the room that poll() saw. */
static void write_line(char *line, size_t n)
{
    pthread_mutex_lock(&write_lock);
    struct pollfd p = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&p, 1, 0) == 0) {
        lost_lines++;
    } else {
        if (lost_lines && log_format == TOW_LOG_JSON)
            n += (size_t)snprintf(line + n, END_BYTES, ",\"lost_lines\":%u}", lost_lines);
        else if (lost_lines)
            n += (size_t)snprintf(line + n, END_BYTES, " (%u lines lost)", lost_lines);
        else if (log_format == TOW_LOG_JSON)
            line[n++] = '}';
        line[n++] = '\n';
        lost_lines = 0;
        ssize_t ignored = write(STDERR_FILENO, line, n); /* a closed log is no reason either */
        (void)ignored;
    }
    pthread_mutex_unlock(&write_lock);
}

void tow_log(enum tow_log_level level, const char *fmt, ...)
{
    if (level > log_level) return;
    int saved = errno;
    char raw[LINE_BYTES / 2], line[LINE_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(raw, sizeof raw, fmt, ap);
    va_end(ap);

    struct timespec t;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &t);
    gmtime_r(&t.tv_sec, &tm);
    char when[32];
    size_t wn = strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(when + wn, sizeof when - wn, ".%03ldZ", t.tv_nsec / 1000000);

    size_t o;
    if (log_format == TOW_LOG_JSON) {
        o = (size_t)snprintf(line, sizeof line,
                             "{\"time\":\"%s\",\"level\":\"%s\",\"program\":\"%s\",\"msg\":\"",
                             when, tow_log_levels[level], log_program);
        o += copy_clean(line + o, sizeof line - o - END_BYTES - 2, raw, 1);
        line[o++] = '"';
    } else {
        o = (size_t)snprintf(line, sizeof line, "%s %s %s: ", when, tow_log_levels[level],
                             log_program);
        o += copy_clean(line + o, sizeof line - o - END_BYTES - 2, raw, 0);
    }
    write_line(line, o);
    errno = saved;
}
