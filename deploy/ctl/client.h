/* ctl/client.h - what the subcommands that talk to a router share: its address, its key,
 * its errors. */
#ifndef CTL_CLIENT_H
#define CTL_CLIENT_H

#include "common/base/opt.h"
#include "deploy/ctl/http.h"

struct json;

struct ctl_client {
    /* settings */
    const char *url, *key_file;
    double timeout_s;
    /* after ctl_client_open() */
    struct ctl_server server;
    struct tow_buf key; /* owned; key file as read, cut behind its first key */
};

/* Rows of a subcommand's table. */
#define CTL_CLIENT_OPTS(c, timeout)                                                                \
    {.name = "url",                                                                                \
     .type = TOW_OPT_STRING,                                                                       \
     .out = &(c)->url,                                                                             \
     .def = "http://127.0.0.1:8000",                                                               \
     .help = "the router"},                                                                        \
        {.name = "api-key-file",                                                                   \
         .type = TOW_OPT_STRING,                                                                   \
         .out = &(c)->key_file,                                                                    \
         .otherwise = "no key",                                                                    \
         .help = "file whose first line is the key to send"},                                      \
    {                                                                                              \
        .name = "timeout", .type = TOW_OPT_FLOAT, .out = &(c)->timeout_s, .fmin = 0.1,             \
        .fmax = 86400, .def = (timeout), .unit = "s",                                              \
        .help = "longest wait for a connection, and for each next byte of the answer"              \
    }

/* Checks the settings. Close with ctl_client_close() also after a failure. */
int ctl_client_open(struct ctl_client *c, struct tow_err *err);
void ctl_client_close(struct ctl_client *c);

/* An answer that is not 2xx as an error: "URL: POST /x: 401: message of the server". */
int ctl_client_refused(const struct ctl_client *c, const char *method, const char *path,
                       const struct ctl_reply *reply, struct tow_err *err);
/* One call; a status outside 2xx and also_ok (0 = none) is an error, a body that is not JSON too.
 * Caller frees *out with json_free(). */
int ctl_client_json(const struct ctl_client *c, const char *method, const char *path, int also_ok,
                    struct json **out, int *status, struct tow_err *err);

/* Waits for a router that says on /ready that it is not (a role is missing, it starts), and says so
 * on stderr. TOW_EPEER: not within wait_s. */
int ctl_client_wait_ready(const struct ctl_client *c, const char *command, double wait_s,
                          struct tow_err *err);

/* Appends text with characters that command a terminal, and bytes of none, as \xNN, except tab and
 * line feed. */
void ctl_put_clean(struct tow_buf *out, const char *text, size_t n);
/* An error on stderr, as the subcommand's; names in it may come from anywhere. */
void ctl_complain(const char *command, const struct tow_err *err);

#endif
