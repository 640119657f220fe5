/* base/log.h - one line per event on stderr, as text or JSON.
 *
 * Rules    Lower case, ids first ("req 4f2a: worker p0 lost"). Never prompt text, never a secret.
 * Threads  [any thread]; a line is written with one write(2), so lines never mix.
 * Blocks   Never: what a full pipe does not take is lost, and the next line says how many were.
 */
#ifndef TOW_BASE_LOG_H
#define TOW_BASE_LOG_H

#include <stdbool.h>
#include <stddef.h>

enum tow_log_level { TOW_LOG_ERROR, TOW_LOG_WARN, TOW_LOG_INFO, TOW_LOG_DEBUG };
enum tow_log_format { TOW_LOG_TEXT, TOW_LOG_JSON };
/* Their names in that order, NULL at the end. */
extern const char *const tow_log_levels[], *const tow_log_formats[];

/* program: borrowed for ever (a literal). Call once from main before threads start. */
void tow_log_init(const char *program, enum tow_log_level level, enum tow_log_format format);
int tow_log_enabled(enum tow_log_level level);

/* Bytes that are not valid UTF-8 or are control characters are written as \xNN. */
void tow_log(enum tow_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define tow_error(...) tow_log(TOW_LOG_ERROR, __VA_ARGS__)
#define tow_warn(...)  tow_log(TOW_LOG_WARN, __VA_ARGS__)
#define tow_info(...)  tow_log(TOW_LOG_INFO, __VA_ARGS__)
#define tow_debug(...)                                                                             \
    (tow_log_enabled(TOW_LOG_DEBUG) ? tow_log(TOW_LOG_DEBUG, __VA_ARGS__) : (void)0)

/* Length of the whole UTF-8 character that text begins with (1 to 4), or 0: it is none. */
size_t tow_char_len(const char *text, size_t left);
/* Does a terminal obey it, or order text by it? Of one UTF-8 character of n bytes: U+0000 to
 * U+001F, U+007F to U+009F, line separators, and those that turn the direction of writing. */
bool tow_char_commands(const char *text, size_t n);

#endif
