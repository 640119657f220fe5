/* ctl/http.h - one HTTP/1.1 request to one server over a blocking connection of its own.
 *
 * Why      The operator's tool talks to the router the way any client does;
 *          it needs no more than this.
 * Bounds   Heads and lines as in http_parse.h; a collected body CTL_HTTP_MAX_REPLY bytes; each wait
 *          for the server (to connect, to take our bytes, to send the next ones) timeout_ms.
 * Errors   One line that begins with the server's URL.
 */
#ifndef CTL_HTTP_H
#define CTL_HTTP_H

#include "common/base/buf.h"

#include <stdbool.h>
#include <stdint.h>

struct tow_err;

enum { CTL_HTTP_MAX_REPLY = 64 << 20 };

struct ctl_server {
    const char *url; /* borrowed; for messages */
    char host[256];  /* name or number, without the brackets of [::1] */
    uint16_t port;
    char prefix[256]; /* path put before each request's, without a final '/'; often empty */
    const char *key;  /* borrowed; NULL = none */
    int timeout_ms;
};

/* http://HOST[:PORT][/PREFIX]; url is borrowed. TOW_ECONFIG says what is wrong with it. */
int ctl_server_parse(struct ctl_server *s, const char *url, struct tow_err *err);

/* Bytes of the body as they come; what it returns below 0 ends the call with that. */
typedef int (*ctl_http_on_body)(void *ctx, const char *bytes, size_t n, struct tow_err *err);

struct ctl_reply {
    int status;
    bool event_stream;
    uint32_t retry_after; /* seconds; 0 = not said */
    struct tow_buf body;  /* owned; what on_body did not take */
};

/* Sends method and path (already encoded) with a JSON body, or none when body is NULL, and reads
 * the answer. on_body (NULL: none) gets the body of a 2xx event stream; everything else is
 * collected. reply is set also on failure and freed with ctl_reply_fini(). 0 means an answer
 * came whole, whatever its status. */
int ctl_http_call(const struct ctl_server *s, const char *method, const char *path,
                  const struct tow_buf *body, ctl_http_on_body on_body, void *ctx,
                  struct ctl_reply *reply, struct tow_err *err);
void ctl_reply_fini(struct ctl_reply *reply);

#endif
