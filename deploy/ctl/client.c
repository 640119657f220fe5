/* ctl/client.c - see client.h. */
#include "deploy/ctl/client.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/log.h"
#include "common/text/json.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { MAX_KEY_FILE = 65536 };

int ctl_client_open(struct ctl_client *c, struct tow_err *err)
{
    tow_buf_init(&c->key, MAX_KEY_FILE);
    int rc = ctl_server_parse(&c->server, c->url, err);
    if (rc < 0) return rc;
    c->server.timeout_ms = (int)(c->timeout_s * 1000);
    if (!c->key_file) return 0;
    rc = tow_secret_read(c->key_file, "--api-key-file", MAX_KEY_FILE, &c->key, err);
    if (rc < 0) return rc;
    if (tow_buf_failed(&c->key)) return tow_fail(err, TOW_ENOMEM, "--api-key-file: out of memory");
    size_t n = c->key.data ? strcspn(c->key.data, "\r\n") : 0;
    for (size_t i = 0; i < n; i++)
        if (c->key.data[i] <= ' ' || c->key.data[i] >= 127)
            return tow_fail(err, TOW_ECONFIG,
                            "--api-key-file %s: byte %zu of the first line can't be part of a key",
                            c->key_file, i);
    if (n == 0)
        return tow_fail(err, TOW_ECONFIG, "--api-key-file %s: its first line is empty",
                        c->key_file);
    c->key.data[n] = 0;
    c->server.key = c->key.data;
    return 0;
}

void ctl_client_close(struct ctl_client *c)
{
    tow_buf_fini(&c->key);
}

void ctl_put_clean(struct tow_buf *out, const char *text, size_t n)
{
    for (size_t i = 0, k; i < n; i += k) {
        k = tow_char_len(text + i, n - i);
        const bool plain =
            k && (!tow_char_commands(text + i, k) || text[i] == '\n' || text[i] == '\t');
        if (plain) {
            tow_buf_put(out, text + i, k);
            continue;
        }
        if (k == 0) k = 1;
        for (size_t b = i; b < i + k; b++) tow_buf_printf(out, "\\x%02x", (unsigned char)text[b]);
    }
}

void ctl_complain(const char *command, const struct tow_err *err)
{
    struct tow_buf out;
    tow_buf_init(&out, 0);
    for (const char *p = err->msg; *p;) { /* one line, whatever it repeats */
        const size_t n = strcspn(p, "\n\t");
        ctl_put_clean(&out, p, n);
        p += n;
        if (*p) tow_buf_printf(&out, "\\x%02x", (unsigned char)*p++);
    }
    fprintf(stderr, "towpath-ctl %s: %s\n", command, out.data ? out.data : "out of memory");
    tow_buf_fini(&out);
}

int ctl_client_refused(const struct ctl_client *c, const char *method, const char *path,
                       const struct ctl_reply *reply, struct tow_err *err)
{
    struct json *root = NULL;
    const char *text = NULL;
    size_t n = 0;
    struct tow_buf clean;
    tow_buf_init(&clean, 512);
    if (reply->body.len && json_parse(&root, reply->body.data, reply->body.len, NULL, NULL) == 0)
        text = json_string(json_find(json_find(root, "error"), "message"), &n);
    if (!text && root) text = json_string(json_find(root, "status"), &n);
    if (text) ctl_put_clean(&clean, text, n < 400 ? n : 400);
    int code = reply->status == 401 ? TOW_EAUTH : reply->status == 404 ? TOW_ENOENT : TOW_EPEER;
    tow_fail(err, code, "%s: %s %s: %d%s%s%s", c->url, method, path, reply->status,
             clean.len ? ": " : "", clean.len ? clean.data : "",
             reply->status == 401 && !c->key_file ? " (--api-key-file)" : "");
    if (reply->retry_after && err) {
        size_t used = strlen(err->msg);
        struct tow_buf more;
        tow_buf_init(&more, 64);
        tow_buf_printf(&more, "; retry after %u s", reply->retry_after);
        if (more.data && used + more.len < sizeof err->msg)
            memcpy(err->msg + used, more.data, more.len + 1);
        tow_buf_fini(&more);
    }
    tow_buf_fini(&clean);
    json_free(root);
    return code;
}

int ctl_client_json(const struct ctl_client *c, const char *method, const char *path, int also_ok,
                    struct json **out, int *status, struct tow_err *err)
{
    struct ctl_reply reply;
    int rc = ctl_http_call(&c->server, method, path, NULL, NULL, NULL, &reply, err);
    if (rc == 0 && reply.status / 100 != 2 && reply.status != also_ok)
        rc = ctl_client_refused(c, method, path, &reply, err);
    if (rc == 0) {
        rc = json_parse(out, reply.body.data ? reply.body.data : "", reply.body.len, NULL, err);
        if (rc < 0) tow_note(err, "%s: %s %s", c->url, method, path);
    }
    if (rc == 0 && status) *status = reply.status;
    ctl_reply_fini(&reply);
    return rc;
}

/* The server's word for why it is not ready, in *why; 0: ready, or without a way to ask. */
static int ask_ready(const struct ctl_client *c, struct tow_buf *why, struct tow_err *err)
{
    struct ctl_reply reply;
    struct json *root = NULL;
    size_t n = 0;
    int rc = ctl_http_call(&c->server, "GET", "/ready", NULL, NULL, NULL, &reply, err);
    if (rc == 0 && reply.status == 503) {
        if (reply.body.len) (void)json_parse(&root, reply.body.data, reply.body.len, NULL, NULL);
        const char *word = json_string(json_find(root, "status"), &n);
        tow_buf_clear(why);
        ctl_put_clean(why, word ? word : "503", word ? (n < 80 ? n : 80) : 3);
        json_free(root);
        rc = 1;
    }
    ctl_reply_fini(&reply);
    return rc;
}

int ctl_client_wait_ready(const struct ctl_client *c, const char *command, double wait_s,
                          struct tow_err *err)
{
    const uint64_t end_ms = tow_now_ms() + (uint64_t)(wait_s * 1000);
    struct tow_buf why;
    tow_buf_init(&why, 0);
    int rc = ask_ready(c, &why, err);
    if (rc > 0)
        fprintf(stderr, "towpath-ctl %s: %s is not ready (%s); waiting for it, %g s at most\n",
                command, c->url, why.data ? why.data : "", wait_s);
    while (rc > 0 && tow_now_ms() < end_ms) {
        nanosleep(&(struct timespec){.tv_nsec = 500 * 1000 * 1000}, NULL);
        rc = ask_ready(c, &why, err);
    }
    if (rc > 0)
        rc = tow_fail(err, TOW_EPEER, "%s: not ready after %g s (--ready-wait): %s", c->url, wait_s,
                      why.data ? why.data : "");
    tow_buf_fini(&why);
    return rc;
}
