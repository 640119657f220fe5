/* base/opt.c - settings are read in three passes over one table: each setting keeps the text that
 * won and where it came from, then every text is converted. So an error names its source, and a bad
 * value in the file is reported even when a flag hides it (it would surprise on the next start).
 */
#include "common/base/opt.h"

#include "common/base/buf.h"
#include "common/base/err.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    MAX_CONFIG_BYTES = 1 << 20,
    MAX_NAME = 64,
    WHAT_BYTES = 400,
    MAX_SOCKET_PATH = 107 /* what sockaddr_un holds, without its NUL */
};

struct value {
    char *text; /* owned */
    enum tow_opt_source from;
    unsigned line; /* of the config file, else 0 */
};

struct tow_opts {
    const struct tow_opts_spec *spec; /* borrowed */
    struct value *values;             /* owned; one per table row */
    struct tow_strings *lists;        /* owned; one per table row, for URLS */
    char **list_texts;                /* owned; what the items of lists[i] point into */
    const char **operands;            /* owned array of borrowed texts */
    size_t n_operands;
};

static const struct tow_opt *find(const struct tow_opts_spec *spec, const char *name, size_t len)
{
    for (size_t i = 0; i < spec->n; i++)
        if (strlen(spec->table[i].name) == len && !memcmp(spec->table[i].name, name, len))
            return &spec->table[i];
    return NULL;
}

/* Number of single-letter edits between two short names; more than MAX_NAME counts as far away. */
static unsigned distance(const char *a, size_t na, const char *b)
{
    unsigned row[MAX_NAME + 1];
    size_t nb = strlen(b);
    if (na > MAX_NAME || nb > MAX_NAME) return MAX_NAME;
    for (size_t j = 0; j <= nb; j++) row[j] = (unsigned)j;
    for (size_t i = 1; i <= na; i++) {
        unsigned diagonal = row[0];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= nb; j++) {
            unsigned up = row[j], best = diagonal + (a[i - 1] != b[j - 1]);
            if (up + 1 < best) best = up + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = up;
            row[j] = best;
        }
    }
    return row[nb];
}

/* Every setting of every Towpath program. A TOWPATH_ variable of another program is not this one's
 * business, so that one may be exported for a whole shell; any other is a mistake.
 * tests/cluster/test_ctl.py compares the list with each --help. */
static const char settings_of_all[] =
    " all api-key-file chunk-tokens context-length control default-thinking device"
    " drain-timeout dump expert-activations fault force greedy handover host-tier http"
    " index-capture index-keys index-topk join join-token-file json kv-dtype kv-pages lease"
    " log-format log-level max-batch max-body-bytes max-connections max-pending-tokens max-queued"
    " max-queued-tokens max-tokens max-wait memory-fraction model name numerics out products"
    " queue-timeout record-dir record-max-bytes record-max-requests record-mode report"
    " reserve-tokens served-model-name sse-keepalive stats status step-limit"
    " system temperature thinking threads timeout tokens url"
    " ";

static bool is_of_another(const char *name)
{
    char word[MAX_NAME + 3];
    snprintf(word, sizeof word, " %s ", name);
    return name[0] && strstr(settings_of_all, word);
}

/* where: "flag '--x'", "variable 'TOWPATH_X'" or "FILE:LINE: key 'x'". */
static int unknown(const struct tow_opts_spec *spec, const char *where, const char *name,
                   size_t len, struct tow_err *err)
{
    /* A near name differs in less than half of its letters: --foo is not meant as --url. */
    const char *nearest = NULL;
    unsigned best = len < 6 ? (unsigned)len / 2 + 1 : 4;
    for (size_t i = 0; i < spec->n; i++) {
        unsigned d = distance(name, len, spec->table[i].name);
        if (d < best) {
            best = d;
            nearest = spec->table[i].name;
        }
    }
    if (nearest)
        return tow_fail(err, TOW_ECONFIG, "%s: unknown; did you mean '%s'? --help lists all", where,
                        nearest);
    return tow_fail(err, TOW_ECONFIG, "%s: unknown to %s; --help lists all", where, spec->program);
}

static int set_text(struct tow_opts *o, const struct tow_opt *opt, const char *text,
                    enum tow_opt_source from, unsigned line, struct tow_err *err)
{
    struct value *v = &o->values[opt - o->spec->table];
    char *copy = strdup(text);
    if (!copy) return tow_fail(err, TOW_ENOMEM, "--%s: out of memory", opt->name);
    free(v->text);
    *v = (struct value){.text = copy, .from = from, .line = line};
    return 0;
}

/* --- values ----------------------------------------------------------------------------------- */

static void env_name(const char *name, char out[MAX_NAME + 16])
{
    size_t n = (size_t)snprintf(out, MAX_NAME + 16, "TOWPATH_%s", name);
    for (size_t i = 0; i < n && out[i]; i++) {
        if (out[i] == '-') out[i] = '_';
        if (out[i] >= 'a' && out[i] <= 'z') out[i] = (char)(out[i] - 'a' + 'A');
    }
}

static void name_source(const struct tow_opt *opt, const struct value *v, const char *config,
                        char what[WHAT_BYTES])
{
    char env[MAX_NAME + 16];
    switch (v->from) {
    case TOW_FROM_ENV:
        env_name(opt->name, env);
        snprintf(what, WHAT_BYTES, "%s", env);
        break;
    case TOW_FROM_FILE:
        snprintf(what, WHAT_BYTES, "%.300s:%u: %s", config, v->line, opt->name);
        break;
    default: snprintf(what, WHAT_BYTES, "--%s", opt->name); break;
    }
}

static void put_number(struct tow_buf *b, const struct tow_opt *opt, int64_t v)
{
    static const char units[] = "KMGT";
    int u = -1;
    if (opt->type == TOW_OPT_BYTES)
        while (v >= 1024 && v % 1024 == 0 && u < 3) {
            v /= 1024;
            u++;
        }
    tow_buf_printf(b, "%" PRId64, v);
    if (u >= 0) tow_buf_putc(b, units[u]);
}

static bool is_tcp(const char *scheme)
{
    return strcmp(scheme, "tcp://") == 0;
}

static bool is_ipc(const char *scheme)
{
    return strcmp(scheme, "ipc://") == 0;
}

/* What a value may be: "1 to 4096", "one of fp8, bf16"; nothing for free text. */
static void put_range(struct tow_buf *b, const struct tow_opt *opt)
{
    switch (opt->type) {
    case TOW_OPT_INT:
    case TOW_OPT_BYTES:
        put_number(b, opt, opt->min);
        if (opt->max == opt->min) break;
        if (opt->max == INT64_MAX) {
            tow_buf_puts(b, " or more");
        } else {
            tow_buf_puts(b, " to ");
            put_number(b, opt, opt->max);
        }
        break;
    case TOW_OPT_FLOAT: tow_buf_printf(b, "%g to %g", opt->fmin, opt->fmax); break;
    case TOW_OPT_ENUM:
        for (size_t i = 0; opt->choices[i]; i++)
            tow_buf_printf(b, "%s%s", i ? "|" : "", opt->choices[i]);
        break;
    case TOW_OPT_BOOL: tow_buf_puts(b, "true|false"); break;
    case TOW_OPT_ADDR: tow_buf_puts(b, "ADDR:PORT"); break;
    case TOW_OPT_URLS:
        for (size_t i = 0; opt->choices[i]; i++)
            tow_buf_printf(b, "%s%s%s", i ? " or " : "", opt->choices[i],
                           is_tcp(opt->choices[i])   ? "ADDR:PORT"
                           : is_ipc(opt->choices[i]) ? "/PATH"
                                                     : "...");
        break;
    case TOW_OPT_STRING: break;
    }
}

static int refuse(const struct tow_opt *opt, const char *what, const char *text,
                  struct tow_err *err)
{
    struct tow_buf range;
    tow_buf_init(&range, 400);
    put_range(&range, opt);
    const bool number = opt->type == TOW_OPT_INT || opt->type == TOW_OPT_BYTES;
    const bool one = number && opt->min == opt->max; /* the help says why */
    const bool unit = opt->unit && !one && opt->type != TOW_OPT_STRING;
    if (one) tow_buf_printf(&range, " (%s)", opt->help);
    int rc = tow_fail(err, TOW_ECONFIG, "%s: '%.100s' is not right; must be %s%s%s%s", what, text,
                      one                           ? ""
                      : opt->type == TOW_OPT_INT    ? "a whole number, "
                      : opt->type == TOW_OPT_FLOAT  ? "a number, "
                      : opt->type == TOW_OPT_BYTES  ? "bytes like 512, 64K, 8M or 2G, "
                      : opt->type == TOW_OPT_STRING ? "text, not empty"
                                                    : "",
                      range.data ? range.data : "", unit ? " " : "", unit ? opt->unit : "");
    tow_buf_fini(&range);
    return rc;
}

int tow_bytes_parse(const char *text, const char *what, uint64_t *out, struct tow_err *err)
{
    uint64_t v = 0;
    const char *p = text;
    int shift = 0;
    bool ok = *p >= '0' && *p <= '9' && !(*p == '0' && p[1] >= '0' && p[1] <= '9');
    for (; ok && *p >= '0' && *p <= '9'; p++) {
        ok = v <= (INT64_MAX - 9) / 10;
        v = v * 10 + (uint64_t)(*p - '0');
    }
    if (ok && *p) {
        const char *unit = strchr("KMGT", *p & ~0x20);
        ok = unit && !p[1];
        shift = unit ? (int)(unit - "KMGT") : 0;
    }
    if (ok && *p) {
        static const int shifts[] = {10, 20, 30, 40};
        ok = v <= (uint64_t)INT64_MAX >> shifts[shift];
        v <<= shifts[shift];
    }
    if (!ok)
        return tow_fail(err, TOW_ECONFIG,
                        "%s: '%.100s' is not right; must be bytes like 512, 64K, 8M or 2G", what,
                        text);
    *out = v;
    return 0;
}

/* A dotted quad, or a name: labels of letters, digits, '-' and '_', the last one no number (which
 * resolvers take for an address in octal or in fewer parts). */
static bool host_ok(const char *host)
{
    static const char label[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_";
    struct in_addr v4;
    if (inet_pton(AF_INET, host, &v4) == 1) return true;
    for (const char *p = host;; p++) {
        const size_t n = strspn(p, label);
        if (n == 0 || *p == '-') return false;
        if (p[n] == 0)
            return strspn(p, "0123456789") < n && strncmp(p, "0x", 2) != 0 &&
                   strncmp(p, "0X", 2) != 0;
        p += n;
        if (*p != '.') return false;
    }
}

/* With a zone, perhaps: "fe80::1%eth0". */
static bool host6_ok(const char *host)
{
    char number[INET6_ADDRSTRLEN];
    struct in6_addr v6;
    const size_t n = strcspn(host, "%");
    if (n >= sizeof number || (host[n] && !host[n + 1])) return false;
    memcpy(number, host, n);
    number[n] = 0;
    return inet_pton(AF_INET6, number, &v6) == 1;
}

int tow_addr_parse(const char *text, const char *what, struct tow_addr *out, struct tow_err *err)
{
    const char *colon = strrchr(text, ':');
    const char *host = text;
    size_t len = colon ? (size_t)(colon - text) : 0;
    bool ok = colon && len > 0;
    const bool v6 = ok && *host == '[';
    if (v6) { /* [::1]:8000 */
        ok = len > 2 && host[len - 1] == ']';
        host++;
        len -= 2;
    } else if (ok) {
        ok = !memchr(host, ':', len);
    }
    unsigned long port = 0;
    if (ok) {
        const char *p = colon + 1;
        ok = *p != 0 && !(*p == '0' && p[1]);
        for (; ok && *p; p++) {
            ok = *p >= '0' && *p <= '9' && port <= 6553;
            port = port * 10 + (unsigned long)(*p - '0');
        }
        ok = ok && port <= 65535;
    }
    for (size_t i = 0; ok && i < len; i++) ok = (unsigned char)host[i] > ' ' && host[i] != '/';
    char name[sizeof out->host];
    ok = ok && len < sizeof name;
    if (ok) {
        memcpy(name, host, len);
        name[len] = 0;
        ok = v6 ? host6_ok(name) : host_ok(name);
    }
    if (!ok)
        return tow_fail(err, TOW_ECONFIG,
                        "%s: '%.100s' is not right; must be ADDR:PORT, like 127.0.0.1:8000 or "
                        "[::1]:8000, with a port of 0 to 65535",
                        what, text);
    memcpy(out->host, name, len + 1);
    out->port = (uint16_t)port;
    return 0;
}

static int check_url(const struct tow_opt *opt, const char *what, const char *url,
                     struct tow_err *err)
{
    for (size_t i = 0; opt->choices[i]; i++) {
        size_t n = strlen(opt->choices[i]);
        if (strncmp(url, opt->choices[i], n) != 0 || !url[n]) continue;
        if (strchr(url, '@'))
            return tow_fail(err, TOW_ECONFIG, "%s: a URL holds no user or password; use a file",
                            what);
        struct tow_addr addr;
        bool good = true;
        if (is_tcp(opt->choices[i])) good = tow_addr_parse(url + n, what, &addr, NULL) == 0;
        if (is_ipc(opt->choices[i])) good = url[n] == '/';
        if (good && is_ipc(opt->choices[i]) && strlen(url + n) > MAX_SOCKET_PATH)
            return tow_fail(err, TOW_ECONFIG,
                            "%s: '%.100s': a path of %zu bytes; a socket's has at most %d", what,
                            url, strlen(url + n), MAX_SOCKET_PATH);
        if (good) return 0;
    }
    return refuse(opt, what, url, err);
}

static int set_urls(struct tow_opts *o, const struct tow_opt *opt, const char *what,
                    const char *text, struct tow_strings *out, struct tow_err *err)
{
    size_t n = 1, at = (size_t)(opt - o->spec->table);
    for (const char *p = text; *p; p++) n += *p == ',';
    const char **items = calloc(n, sizeof *items);
    char *copy = strdup(text);
    if (!items || !copy) {
        free(items);
        free(copy);
        return tow_fail(err, TOW_ENOMEM, "%s: out of memory", what);
    }
    free(o->lists[at].items);
    free(o->list_texts[at]);
    o->lists[at] = (struct tow_strings){.items = items, .n = n};
    o->list_texts[at] = copy;
    for (size_t i = 0; i < n; i++) {
        char *comma = strchr(copy, ',');
        if (comma) *comma = 0;
        items[i] = copy;
        int rc = check_url(opt, what, copy, err);
        if (rc < 0) return rc;
        if (comma) copy = comma + 1;
    }
    *out = o->lists[at];
    return 0;
}

static int parse_bool(const char *text)
{
    static const char *const yes[] = {"true", "yes", "on", "1"}, *const no[] = {"false", "no",
                                                                                "off", "0"};
    for (int i = 0; i < 4; i++) {
        if (!strcmp(text, yes[i])) return 1;
        if (!strcmp(text, no[i])) return 0;
    }
    return -1;
}

/* A decimal number as JSON writes one: -12, 0.5, 1e-3. No sign +, no blank, no 0 in front, no
 * hexadecimal: a number has one spelling, and 010 is neither 8 nor 10. */
static bool plain_number(const char *s, bool fraction)
{
    s += *s == '-';
    size_t n = strspn(s, "0123456789");
    if (n < 1 || (n > 1 && *s == '0')) return false;
    s += n;
    if (fraction && *s == '.') {
        n = strspn(++s, "0123456789");
        if (n < 1) return false;
        s += n;
    }
    if (fraction && (*s == 'e' || *s == 'E')) {
        s++;
        s += *s == '-' || *s == '+';
        n = strspn(s, "0123456789");
        if (n < 1) return false;
        s += n;
    }
    return *s == 0;
}

/* Converts text into *opt->out. */
static int convert(struct tow_opts *o, const struct tow_opt *opt, const char *what,
                   const char *text, struct tow_err *err)
{
    char *end;
    switch (opt->type) {
    case TOW_OPT_STRING:
        if (!*text) return refuse(opt, what, text, err);
        *(const char **)opt->out = text;
        return 0;
    case TOW_OPT_INT: {
        errno = 0;
        int64_t v = strtoll(text, &end, 10);
        if (!plain_number(text, false) || *end || errno || v < opt->min || v > opt->max)
            return refuse(opt, what, text, err);
        *(int64_t *)opt->out = v;
        return 0;
    }
    case TOW_OPT_BYTES: {
        uint64_t v;
        if (tow_bytes_parse(text, what, &v, NULL) < 0 || v < (uint64_t)opt->min ||
            v > (uint64_t)opt->max)
            return refuse(opt, what, text, err);
        *(uint64_t *)opt->out = v;
        return 0;
    }
    case TOW_OPT_FLOAT: {
        errno = 0;
        double v = strtod(text, &end);
        if (!plain_number(text, true) || *end || !isfinite(v) || v < opt->fmin || v > opt->fmax)
            return refuse(opt, what, text, err);
        *(double *)opt->out = v;
        return 0;
    }
    case TOW_OPT_ENUM:
        for (int i = 0; opt->choices[i]; i++)
            if (!strcmp(text, opt->choices[i])) {
                *(int *)opt->out = i;
                return 0;
            }
        return refuse(opt, what, text, err);
    case TOW_OPT_BOOL: {
        int v = parse_bool(text);
        if (v < 0) return refuse(opt, what, text, err);
        *(bool *)opt->out = v;
        return 0;
    }
    case TOW_OPT_ADDR: return tow_addr_parse(text, what, opt->out, err);
    case TOW_OPT_URLS: return set_urls(o, opt, what, text, opt->out, err);
    }
    return TOW_EINVAL;
}

/* --- sources ---------------------------------------------------------------------------------- */

static int read_file(const char *path, size_t max, struct tow_buf *out, struct stat *st,
                     struct tow_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return tow_fail(err, TOW_ECONFIG, "%.300s: %s", path, strerror(errno));
    int rc = 0;
    if (fstat(fd, st) < 0 || !S_ISREG(st->st_mode)) {
        rc = tow_fail(err, TOW_ECONFIG, "%.300s: not a regular file", path);
        goto close_fd;
    }
    for (;;) {
        char piece[4096];
        ssize_t n = read(fd, piece, sizeof piece);
        if (n == 0) break;
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            rc = tow_fail(err, TOW_ECONFIG, "%.300s: %s", path, strerror(errno));
            break;
        }
        if (out->len + (size_t)n > max) {
            rc = tow_fail(err, TOW_ECONFIG, "%.300s: larger than %zu bytes", path, max);
            break;
        }
        tow_buf_put(out, piece, (size_t)n);
    }
    if (rc == 0 && tow_buf_failed(out))
        rc = tow_fail(err, TOW_ENOMEM, "%.300s: out of memory", path);
close_fd:
    close(fd);
    return rc;
}

static char *trim(char *s)
{
    while (*s == ' ' || *s == '\t') s++;
    size_t n = strlen(s);
    while (n && (s[n - 1] == ' ' || s[n - 1] == '\t' || s[n - 1] == '\r')) s[--n] = 0;
    return s;
}

static int read_config_line(struct tow_opts *o, const char *path, unsigned line, char *text,
                            struct tow_err *err)
{
    char *s = trim(text);
    if (!*s || *s == '#') return 0;
    char *eq = strchr(s, '=');
    if (!eq || eq == s)
        return tow_fail(err, TOW_ECONFIG, "%.300s:%u: '%.60s' is not `name = value`", path, line,
                        s);
    *eq = 0;
    char *name = trim(s), *value = trim(eq + 1);

    const struct tow_opt *opt = find(o->spec, name, strlen(name));
    if (!opt) {
        char where[WHAT_BYTES];
        snprintf(where, sizeof where, "%.300s:%u: key '%.60s'", path, line, name);
        return unknown(o->spec, where, name, strlen(name), err);
    }
    const struct value *v = &o->values[opt - o->spec->table];
    if (v->from == TOW_FROM_FILE)
        return tow_fail(err, TOW_ECONFIG, "%.300s:%u: key '%s' stands in line %u too", path, line,
                        name, v->line);
    return set_text(o, opt, value, TOW_FROM_FILE, line, err);
}

/* Every value of a file is converted here once, so that one hidden by a flag is checked too. */
static int read_config(struct tow_opts *o, const char *path, struct tow_err *err)
{
    struct tow_buf b;
    struct stat st;
    tow_buf_init(&b, MAX_CONFIG_BYTES + 1);
    int rc = read_file(path, MAX_CONFIG_BYTES, &b, &st, err);
    if (rc < 0) tow_note(err, "--config");
    if (rc == 0 && b.len && memchr(b.data, 0, b.len))
        rc = tow_fail(err, TOW_ECONFIG, "--config: %.300s: holds a zero byte", path);
    if (rc == 0 && b.len >= 3 && !memcmp(b.data, "\xef\xbb\xbf", 3))
        rc = tow_fail(err, TOW_ECONFIG,
                      "--config: %.300s: begins with a byte order mark (ef bb bf); must be plain "
                      "UTF-8",
                      path);
    unsigned line = 0;
    for (char *p = b.data, *next; rc == 0 && p && *p; p = next) {
        char *end = strchr(p, '\n');
        next = end ? end + 1 : p + strlen(p);
        if (end) *end = 0;
        rc = read_config_line(o, path, ++line, p, err);
    }
    for (size_t i = 0; rc == 0 && i < o->spec->n; i++) {
        const struct value *v = &o->values[i];
        char what[WHAT_BYTES];
        if (v->from != TOW_FROM_FILE) continue;
        name_source(&o->spec->table[i], v, path, what);
        rc = convert(o, &o->spec->table[i], what, v->text, err);
    }
    tow_buf_fini(&b);
    return rc;
}

/* Comes after the flags, whose values stay. */
static int read_env(struct tow_opts *o, const char *const *env, const char **config,
                    struct tow_err *err)
{
    for (; env && *env; env++) {
        const char *eq = strchr(*env, '=');
        if (strncmp(*env, "TOWPATH_", 8) != 0 || !eq) continue;
        char name[MAX_NAME + 1];
        size_t len = (size_t)(eq - *env) - 8, n = len < MAX_NAME ? len : MAX_NAME;
        for (size_t i = 0; i < n; i++) {
            char c = (*env)[8 + i];
            name[i] = c == '_' ? '-' : c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : '?';
            if (c >= '0' && c <= '9') name[i] = c;
        }
        name[n] = 0;
        if (!strcmp(name, "config")) {
            if (!*config) *config = eq + 1;
            continue;
        }
        const struct tow_opt *opt = len <= MAX_NAME ? find(o->spec, name, n) : NULL;
        if (!opt && len <= MAX_NAME && is_of_another(name)) continue;
        if (!opt) {
            char where[WHAT_BYTES];
            snprintf(where, sizeof where, "variable '%.*s'", (int)(n + 8), *env);
            return unknown(o->spec, where, name, n, err);
        }
        const struct value *v = &o->values[opt - o->spec->table];
        int rc = v->text && v->from == TOW_FROM_FLAG
                     ? 0
                     : set_text(o, opt, eq + 1, TOW_FROM_ENV, 0, err);
        if (rc < 0) return rc;
    }
    return 0;
}

static bool is_word(const char *name, size_t len, const char *word)
{
    return len == strlen(word) && !memcmp(name, word, len);
}

/* --config, --check-config, --version and --help are flags of every program; NULL value when it has
 * none. */
static bool take_common(const char *name, size_t len, const char *value, const char **config,
                        enum tow_opts_do *what)
{
    if (is_word(name, len, "help") && !value) {
        *what = TOW_OPTS_HELP;
    } else if (is_word(name, len, "version") && !value) {
        if (*what != TOW_OPTS_HELP) *what = TOW_OPTS_VERSION;
    } else if (is_word(name, len, "check-config") && !value) {
        if (*what == TOW_OPTS_RUN) *what = TOW_OPTS_CHECK;
    } else if (is_word(name, len, "config") && value) {
        *config = value;
    } else {
        return false;
    }
    return true;
}

static int read_flags(struct tow_opts *o, int argc, const char *const *argv, const char **config,
                      enum tow_opts_do *what, struct tow_err *err)
{
    const struct tow_opts_spec *spec = o->spec;
    bool flags_over = false;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (!strcmp(arg, "--") && !flags_over) {
            flags_over = true;
            continue;
        }
        if (!strcmp(arg, "-h") && !flags_over) {
            *what = TOW_OPTS_HELP;
            continue;
        }
        if (flags_over || arg[0] != '-' || !arg[1]) {
            if (o->n_operands == spec->max_operands)
                return tow_fail(err, TOW_ECONFIG, "argument '%.100s': %s takes %s%s", arg,
                                spec->program, spec->max_operands ? "no more than " : "flags only",
                                spec->max_operands ? spec->operands : "");
            o->operands[o->n_operands++] = arg;
            continue;
        }
        const char *name = arg + 2, *eq = strchr(arg, '=');
        size_t len = arg[1] != '-' ? 0 : eq ? (size_t)(eq - name) : strlen(name);
        const char *value = eq ? eq + 1 : NULL;
        const struct tow_opt *opt = len ? find(spec, name, len) : NULL;
        bool is_config = is_word(name, len, "config");
        if (!value && (is_config || (opt && opt->type != TOW_OPT_BOOL))) {
            if (i + 1 == argc)
                return tow_fail(err, TOW_ECONFIG, "--%.*s: needs a value", (int)len, name);
            value = argv[++i];
        }
        if (take_common(name, len, value, config, what)) continue;
        if (value && (is_word(name, len, "help") || is_word(name, len, "version") ||
                      is_word(name, len, "check-config")))
            return tow_fail(err, TOW_ECONFIG, "--%.*s: '%.100s' is too much; it takes no value",
                            (int)len, name, value);
        if (!opt) {
            char where[WHAT_BYTES];
            snprintf(where, sizeof where, "flag '%.*s'", (int)(eq ? eq - arg : 100), arg);
            return unknown(spec, where, name, len, err);
        }
        int rc = set_text(o, opt, value ? value : "true", TOW_FROM_FLAG, 0, err);
        if (rc < 0) return rc;
    }
    return 0;
}

/* Flags and environment are read first (they may name the config file) and laid over the file's.
 * --help and --version work whatever the environment holds. */
static int read_sources(struct tow_opts *o, int argc, const char *const *argv,
                        const char *const *env, enum tow_opts_do *what, struct tow_err *err)
{
    const char *config = NULL;
    struct value *file = NULL;
    size_t n = o->spec->n;
    int rc = read_flags(o, argc, argv, &config, what, err);
    if (rc < 0 || *what == TOW_OPTS_HELP || *what == TOW_OPTS_VERSION) return rc;
    rc = read_env(o, env, &config, err);
    if (rc < 0) return rc;
    if (config) {
        struct value *over = o->values;
        file = calloc(n ? n : 1, sizeof *file);
        if (!file) return tow_fail(err, TOW_ENOMEM, "--config: out of memory");
        o->values = file;
        rc = read_config(o, config, err);
        o->values = over;
        for (size_t i = 0; i < n; i++) {
            if (!over[i].text && file[i].text) {
                over[i] = file[i];
                file[i].text = NULL;
            }
            free(file[i].text);
        }
        free(file);
        if (rc < 0) return rc;
    }
    for (size_t i = 0; i < n; i++) {
        const struct tow_opt *opt = &o->spec->table[i];
        if (!o->values[i].text && opt->def)
            rc = set_text(o, opt, opt->def, TOW_FROM_DEFAULT, 0, err);
        if (rc < 0) return rc;
        if (!o->values[i].text) {
            if (opt->required)
                return tow_fail(err, TOW_ECONFIG, "--%s: must be given (%s)", opt->name, opt->help);
            continue;
        }
        char at[WHAT_BYTES];
        name_source(opt, &o->values[i], config ? config : "", at);
        rc = convert(o, opt, at, o->values[i].text, err);
        if (rc < 0) return rc;
    }
    return 0;
}

int tow_opts_new(struct tow_opts **out, const struct tow_opts_spec *spec, int argc,
                 const char *const *argv, const char *const *env, enum tow_opts_do *what,
                 struct tow_err *err)
{
    size_t n = spec->n ? spec->n : 1;
    struct tow_opts *o = calloc(1, sizeof *o);
    if (!o) return tow_fail(err, TOW_ENOMEM, "settings: out of memory");
    o->spec = spec;
    o->values = calloc(n, sizeof *o->values);
    o->lists = calloc(n, sizeof *o->lists);
    o->list_texts = calloc(n, sizeof *o->list_texts);
    o->operands = calloc(spec->max_operands + 1, sizeof *o->operands);
    int rc = TOW_ENOMEM;
    enum tow_opts_do how = TOW_OPTS_RUN;
    if (!o->values || !o->lists || !o->list_texts || !o->operands)
        tow_fail(err, rc, "settings: out of memory");
    else
        rc = read_sources(o, argc, argv, env, &how, err);
    if (rc < 0) {
        tow_opts_free(o);
        return rc;
    }
    *what = how;
    *out = o;
    return 0;
}

void tow_opts_free(struct tow_opts *o)
{
    if (!o) return;
    for (size_t i = 0; i < o->spec->n; i++) {
        if (o->values) free(o->values[i].text);
        if (o->lists) free(o->lists[i].items);
        if (o->list_texts) free(o->list_texts[i]);
    }
    free(o->values);
    free(o->lists);
    free(o->list_texts);
    free(o->operands);
    free(o);
}

enum tow_opt_source tow_opts_source(const struct tow_opts *o, const char *name)
{
    const struct tow_opt *opt = find(o->spec, name, strlen(name));
    tow_assert(opt);
    return o->values[opt - o->spec->table].from;
}

size_t tow_opts_n_operands(const struct tow_opts *o)
{
    return o->n_operands;
}

const char *tow_opts_operand(const struct tow_opts *o, size_t i)
{
    tow_assert(i < o->n_operands);
    return o->operands[i];
}

/* --- text for people -------------------------------------------------------------------------- */

static void put_help_row(struct tow_buf *out, const struct tow_opt *opt)
{
    struct tow_buf left;
    tow_buf_init(&left, 0);
    tow_buf_printf(&left, "  --%s", opt->name);
    if (opt->type == TOW_OPT_STRING) tow_buf_puts(&left, " TEXT");
    if (opt->type == TOW_OPT_URLS) tow_buf_puts(&left, " URL[,URL]");
    if (opt->type == TOW_OPT_ADDR) tow_buf_puts(&left, " ADDR:PORT");
    if (opt->type == TOW_OPT_INT || opt->type == TOW_OPT_FLOAT) tow_buf_puts(&left, " N");
    if (opt->type == TOW_OPT_BYTES) tow_buf_puts(&left, " BYTES");
    if (opt->type == TOW_OPT_ENUM) {
        tow_buf_putc(&left, ' ');
        put_range(&left, opt);
    }
    tow_buf_printf(out, "%-32s %s", left.data ? left.data : "", opt->help);
    tow_buf_fini(&left);
    tow_buf_puts(out, " (");
    if (opt->type == TOW_OPT_INT || opt->type == TOW_OPT_FLOAT || opt->type == TOW_OPT_BYTES) {
        put_range(out, opt);
        if (opt->unit) tow_buf_printf(out, " %s", opt->unit);
        tow_buf_puts(out, "; ");
    }
    if (opt->def)
        tow_buf_printf(out, "default %s)\n", opt->def);
    else
        tow_buf_printf(out, "%s)\n",
                       opt->required    ? "required"
                       : opt->otherwise ? opt->otherwise
                                        : "default none");
}

void tow_opts_help(const struct tow_opts_spec *spec, struct tow_buf *out)
{
    tow_buf_printf(out, "%s: %s\n\nusage: %s [flags]%s%s\n\n", spec->program, spec->about,
                   spec->program, spec->operands ? " " : "", spec->operands ? spec->operands : "");
    for (size_t i = 0; i < spec->n; i++) put_help_row(out, &spec->table[i]);
    tow_buf_printf(out, "%-32s %s\n", "  --config FILE", "settings as `name = value` lines");
    tow_buf_printf(out, "%-32s %s\n", "  --check-config", "check the settings and exit");
    tow_buf_printf(out, "%-32s %s\n", "  --version", "version and how it was built");
    tow_buf_printf(out, "%-32s %s\n\n", "  --help", "this text");
    tow_buf_puts(out, "A flag wins over the environment (TOWPATH_NAME), that over the file.\n");
}

void tow_print_version(const char *program)
{
#if defined(TOW_CUDA)
    const char *cuda = "yes";
#else
    const char *cuda = "no";
#endif
#if defined(TOW_HAVE_SYSTEMD)
    const char *systemd = "yes";
#else
    const char *systemd = "no";
#endif
    printf("%s " TOW_VERSION " (CUDA %s, systemd %s)\n", program, cuda, systemd);
}

bool tow_opts_tell(const struct tow_opts_spec *spec, enum tow_opts_do what)
{
    if (what == TOW_OPTS_VERSION) tow_print_version(spec->program);
    if (what != TOW_OPTS_HELP) return what == TOW_OPTS_VERSION;
    struct tow_buf help;
    tow_buf_init(&help, 0);
    tow_opts_help(spec, &help);
    fputs(help.data ? help.data : "", stdout);
    tow_buf_fini(&help);
    return true;
}

void tow_opts_print(const struct tow_opts *o, struct tow_buf *out)
{
    bool first = true;
    for (size_t i = 0; i < o->spec->n; i++) {
        const struct value *v = &o->values[i];
        if (!v->text || v->from == TOW_FROM_DEFAULT) continue;
        tow_buf_printf(out, "%s%s=%s", first ? "" : " ", o->spec->table[i].name, v->text);
        first = false;
    }
}

/* --- secrets ---------------------------------------------------------------------------------- */

int tow_secret_read(const char *path, const char *what, size_t max_bytes, struct tow_buf *out,
                    struct tow_err *err)
{
    struct tow_buf b;
    struct stat st;
    tow_buf_init(&b, max_bytes + 4096);
    int rc = read_file(path, max_bytes, &b, &st, err);
    if (rc < 0) {
        tow_note(err, "%s", what);
        goto wipe;
    }
    if (st.st_mode & 037) {
        rc = tow_fail(err, TOW_ECONFIG, "%s: %.300s has mode %04o; must be 0640 or tighter", what,
                      path, (unsigned)(st.st_mode & 07777));
        goto wipe;
    }
    if (st.st_uid != 0 && st.st_uid != geteuid()) {
        rc =
            tow_fail(err, TOW_ECONFIG, "%s: %.300s belongs to user %u; must be ours (%u) or root's",
                     what, path, (unsigned)st.st_uid, (unsigned)geteuid());
        goto wipe;
    }
    size_t n = b.len;
    if (n && b.data[n - 1] == '\n') n--;
    if (n && b.data[n - 1] == '\r') n--;
    if (n == 0) {
        rc = tow_fail(err, TOW_ECONFIG, "%s: %.300s is empty", what, path);
        goto wipe;
    }
    const char *zero = memchr(b.data, 0, n); /* where a C string of it would end */
    if (zero) {
        rc = tow_fail(err, TOW_ECONFIG, "%s: %.300s holds a zero byte, at %zu; must be text", what,
                      path, (size_t)(zero - b.data));
        goto wipe;
    }
    tow_buf_put(out, b.data, n);
    if (tow_buf_failed(out)) rc = tow_fail(err, TOW_ENOMEM, "%s: out of memory", what);
wipe:
    if (b.data) explicit_bzero(b.data, b.cap);
    tow_buf_fini(&b);
    return rc;
}
