/* tests/support/args.h - what tests and benchmarks make of their arguments and settings, and say of
 * one that is wrong.
 */
#ifndef TESTS_SUPPORT_ARGS_H
#define TESTS_SUPPORT_ARGS_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BENCH_WRONG = 2 };

/* A device's error may begin with the flag of the programs that are served; what is behind it, for
 * who was told the device in another way. The whole of msg where it does not. */
static inline const char *test_without_flag(const char *msg)
{
    static const char flag[] = "--device ";
    return strncmp(msg, flag, sizeof flag - 1) ? msg : msg + sizeof flag - 1;
}

/* One line that says what is wrong, and the end. */
static inline void bench_wrong(const char *what, const char *value, const char *want)
{
    fprintf(stderr, "%s: %s '%s': must be %s\n", program_invocation_short_name, what, value, want);
    exit(BENCH_WRONG);
}
/* Numbers in decimal digits with commas between, each least .. most: how many, or -1 where the text
 * is something else or there are more than max. */
static inline int bench_numbers(const char *text, long least, long most, int max, int32_t *out)
{
    for (int n = 0;; text++) {
        const size_t digits = strspn(text, "0123456789");
        const long v = digits < 10 ? strtol(text, NULL, 10) : -1;
        if (digits == 0 || (digits > 1 && *text == '0') || v < least || v > most) return -1;
        if (n == max) return -1;
        out[n++] = (int32_t)v;
        text += digits;
        if (!*text) return n;
        if (*text != ',') return -1;
    }
}
/* One such number; ends the program otherwise. */
static inline int32_t bench_whole(const char *what, const char *text, long least, long most)
{
    char want[64];
    int32_t v = 0;
    snprintf(want, sizeof want, "a whole number, %ld to %ld", least, most);
    if (bench_numbers(text, least, most, 1, &v) != 1) bench_wrong(what, text, want);
    return v;
}

#endif
