/* ctl/drain.c - see drain.h. The router's list is asked twice a second: a draining worker finishes
 * its sequences, says BYE and exits, and is then no longer in the list, or in it with another
 * incarnation once it was started again. */
#include "deploy/ctl/drain.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/text/json.h"
#include "deploy/ctl/client.h"
#include "deploy/ctl/flags.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { ASK_EVERY_MS = 500, MAX_NAME = 256 };

struct sight {
    bool there;
    char state[64];
    char incarnation[64]; /* as written; empty when the router does not tell */
};

static void copy_value(const struct json *v, char *out, size_t cap)
{
    struct tow_buf text;
    tow_buf_init(&text, 0);
    *out = 0;
    if (json_type(v) != JSON_NULL) {
        size_t n;
        const char *s = json_string(v, &n);
        if (s)
            ctl_put_clean(&text, s, n);
        else
            json_dump(&text, v);
        snprintf(out, cap, "%s", text.data ? text.data : "");
    }
    tow_buf_fini(&text);
}

static int look(const struct ctl_client *c, const char *name, struct sight *out,
                struct tow_err *err)
{
    struct json *workers = NULL;
    int rc = ctl_client_json(c, "GET", "/admin/workers", 0, &workers, NULL, err);
    if (rc < 0) return rc;
    memset(out, 0, sizeof *out);
    JSON_EACH(w, workers)
    {
        const char *s = json_string(json_find(w, "name"), NULL);
        if (!s || strcmp(s, name) != 0) continue;
        copy_value(json_find(w, "state"), out->state, sizeof out->state);
        copy_value(json_find(w, "incarnation"), out->incarnation, sizeof out->incarnation);
        out->there = strcmp(out->state, "gone") != 0;
    }
    json_free(workers);
    return 0;
}

static void put_path(struct tow_buf *b, const char *name)
{
    tow_buf_puts(b, "/admin/workers/");
    for (const unsigned char *p = (const unsigned char *)name; *p; p++) {
        bool plain = (*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z') ||
                     (*p >= '0' && *p <= '9') || strchr("-._~", *p);
        if (plain)
            tow_buf_putc(b, (char)*p);
        else
            tow_buf_printf(b, "%%%02X", *p);
    }
    tow_buf_puts(b, "/drain");
}

/* *stays: the time is up and the worker is still there. */
static int wait_gone(const struct ctl_client *c, const char *name, const struct sight *first,
                     double max_wait_s, bool *stays, struct tow_err *err)
{
    const uint64_t begin = tow_now_ms(), deadline = begin + (uint64_t)(max_wait_s * 1000);
    char said[64] = "";
    for (;;) {
        struct sight now;
        int rc = look(c, name, &now, err);
        if (rc < 0) return rc;
        if (!now.there || strcmp(now.incarnation, first->incarnation) != 0) {
            printf("%s: gone after %.1f s\n", name, (double)(tow_now_ms() - begin) / 1000.0);
            return 0;
        }
        if (strcmp(said, now.state) != 0) {
            printf("%s: %s\n", name, now.state);
            fflush(stdout);
            memcpy(said, now.state, sizeof said);
        }
        *stays = tow_now_ms() >= deadline;
        if (*stays)
            return tow_fail(err, TOW_ETIME,
                            "%s: still %s after %.1f s (--max-wait); it goes on draining", name,
                            now.state, max_wait_s);
        nanosleep(&(struct timespec){.tv_nsec = ASK_EVERY_MS * 1000000L}, NULL);
    }
}

static int drain(const struct ctl_client *c, const char *name, double max_wait_s, bool *stays,
                 struct tow_err *err)
{
    struct sight first = {0};
    struct json *answer = NULL;
    struct tow_buf path;
    tow_buf_init(&path, 0);
    put_path(&path, name);
    int rc = look(c, name, &first, err);
    if (rc == 0) rc = ctl_client_json(c, "POST", path.data, 0, &answer, NULL, err);
    json_free(answer);
    tow_buf_fini(&path);
    if (rc == 0 && max_wait_s > 0) rc = wait_gone(c, name, &first, max_wait_s, stays, err);
    return rc;
}

int ctl_drain_main(int argc, char **argv)
{
    struct ctl_client c = {0};
    double max_wait_s = 0;
    bool stays = false;
    const struct tow_opt table[] = {
        CTL_CLIENT_OPTS(&c, "30"),
        {.name = "max-wait",
         .type = TOW_OPT_FLOAT,
         .out = &max_wait_s,
         .fmin = 0,
         .fmax = 86400,
         .def = "900",
         .unit = "s",
         .help = "longest wait until the worker has gone; 0 does not wait"},
    };
    const struct tow_opts_spec spec = {
        .program = "towpath-ctl drain",
        .about =
            "gives a worker no new work and waits until it has finished and gone; exits 1 when "
            "--max-wait is over before that, 2 when it could not be asked",
        .operands = "NAME",
        .max_operands = 1,
        .table = table,
        .n = sizeof table / sizeof *table};
    struct tow_opts *opts;
    struct tow_err err = {0};
    int rc = ctl_flags_read(&opts, &spec, argc, argv, &err);
    const bool go = rc == CTL_FLAGS_RUN;
    if (rc > 0) {
        const char *name = tow_opts_n_operands(opts) ? tow_opts_operand(opts, 0) : "";
        rc = ctl_client_open(&c, &err);
        if (rc == 0 && (!*name || strlen(name) > MAX_NAME))
            rc = tow_fail(&err, TOW_ECONFIG, "NAME: a worker's name of 1 to %d bytes is needed",
                          (int)MAX_NAME);
        if (rc == 0 && go) rc = drain(&c, name, max_wait_s, &stays, &err);
        ctl_client_close(&c);
    }
    tow_opts_free(opts);
    if (rc < 0) ctl_complain("drain", &err);
    return stays ? CTL_EXIT_NO : rc < 0 ? CTL_EXIT_FAILED : CTL_EXIT_GOOD;
}
