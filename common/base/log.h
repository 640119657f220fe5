/* base/log.h - one line per event on stderr, as text or JSON.
 *
 * Rules    Lower case, ids first ("req 4f2a: worker p0 lost"). Never prompt text, never a secret.
 * Threads  [any thread]; a line is written with one write(2), so lines never mix.
 * Blocks   Never: what a full pipe does not take is lost, and the next line says how many were.
 */
#ifndef TOW_BASE_LOG_H
#define TOW_BASE_LOG_H

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

#endif
