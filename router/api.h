/* router/api.h - the OpenAI-shaped API over a back end.
 *
 * Why      The one place that maps URLs to work: who may call, what is asked, what is answered.
 *          api_request.c checks bodies, output.c turns token ids into text and calls,
 *          api_response.c and api_stream.c write what goes back.
 * Owner    The router's loop thread; large bodies are checked and tokenised on the loop's pool.
 * Contract docs/http-api.md.
 */
#ifndef RTR_API_H
#define RTR_API_H

#include "router/backend.h"
#include "router/http_conn.h"

struct rtr_api;
struct text_tokenizer;
struct tow_metrics;

struct rtr_api_config {
    const char *http_addr;         /* "127.0.0.1:8000" */
    const char *served_model_name; /* NULL or "": any name is accepted, and model_name is listed */
    const char *model_name;        /* what /v1/models says without served_model_name */
    const char *api_key_file;      /* NULL or "": no keys needed */
    uint32_t context_length;       /* of the model; the back end may say less */
    uint32_t n_vocab;              /* ids of the model; token ids from clients are below it */
    uint32_t sse_keepalive_s;      /* 0: off */
    uint32_t max_pool_jobs;        /* large bodies being checked at once; 0: 64 */
    bool default_thinking;         /* when the request does not say */
    bool index_capture;            /* may requests ask what the indexer ranks? */
    const int32_t *ratios;         /* of the model's layers, for index_capture; borrowed */
    uint32_t n_layers;
    struct rtr_http_limits limits; /* rtr_http_defaults to start from */
    struct tow_metrics *metrics;   /* borrowed; what /metrics prints, and where we register ours */
};
void rtr_api_config_init(struct rtr_api_config *c); /* the defaults */

/* What rtr_api_open() would say of the file of keys. */
int rtr_api_check_keys(const char *path, struct tow_err *err);

/* Opens the HTTP endpoint on the loop. Strings of the config are copied; tok and backend with self
 * are borrowed until closed. */
int rtr_api_open(struct rtr_api **out, struct uv_loop_s *loop, const struct rtr_api_config *config,
                 const struct text_tokenizer *tok, const struct rtr_backend *backend, void *self,
                 struct tow_err *err);
uint16_t rtr_api_port(const struct rtr_api *a);

/* From now on: /ready is 503, new work is refused with 503, running requests go on. */
void rtr_api_drain(struct rtr_api *a);
/* Requests being worked on; 0 after drain means it is time to close. */
uint32_t rtr_api_in_flight(const struct rtr_api *a);
/* Ends what is still running: streams with an error event, others with 503. */
void rtr_api_fail_all(struct rtr_api *a, const struct rtr_refusal *why);
/* Cancels what is left and closes. on_closed comes once all memory but `a` itself is back; a is
 * freed right after it. */
void rtr_api_close(struct rtr_api *a, void (*on_closed)(void *arg), void *arg);

#endif
