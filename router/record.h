/* router/record.h - requests on disk, so that an answer can be replayed (towpath-ctl explain).
 *
 * Why      Opt-in: a back end laid over another one. Off, it is not there and costs nothing; the
 *          halves on either side do not know of it.
 * Owner    The loop thread. Files are written on libuv's pool, one at a time, so a slow disk takes
 *          one thread of it and never the loop.
 * Bounds   At most RTR_RECORD_QUEUE records, and RTR_RECORD_QUEUE_BYTES of ids, wait for the disk;
 *          more are dropped and counted. The oldest files make room for a new one. A record that
 *          cannot be kept never fails its request.
 * What     Of every request that gave tokens or ended well: ids in and out, sampling, who worked on
 *          it (common/text/record.h). Never keys, headers or text; ids stand for the text.
 * Files    DIR/ID.json by the id that the client was given; written under another name and renamed.
 */
#ifndef RTR_RECORD_H
#define RTR_RECORD_H

#include "router/backend.h"

struct rtr_recorder;
struct tow_metrics;
struct uv_loop_s;

enum { RTR_RECORD_QUEUE = 64 };
#define RTR_RECORD_QUEUE_BYTES ((size_t)64 << 20)

struct rtr_record_config {
    const char *dir; /* made with mode 0700 when absent */
    uint32_t mode;   /* of files */
    uint64_t max_bytes;
    uint32_t max_requests;
    const char *model; /* name; copied */
    uint32_t n_vocab;
    const int32_t *eos; /* [n_eos], copied */
    uint32_t n_eos;
    struct tow_metrics *metrics;     /* borrowed */
    const struct rtr_backend *inner; /* copied */
    void *inner_self;                /* borrowed */
};

extern const struct rtr_backend rtr_recorder_backend; /* self: the recorder */

/* "0640" to *mode. TOW_ECONFIG for what is no mode, what everybody could write, what we could not
 * read and write. `what` names the setting. */
int rtr_record_mode(const char *text, const char *what, uint32_t *mode, struct tow_err *err);

/* What rtr_recorder_open() would say of the folder, without making or writing anything. */
int rtr_record_check_dir(const char *dir, struct tow_err *err);

/* loop: borrowed. Makes sure that files can be written there and that no other router does, and
 * takes over those of earlier runs.
 * TOW_ECONFIG: the folder, by name and reason; TOW_ENOMEM. */
int rtr_recorder_open(struct rtr_recorder **out, struct uv_loop_s *loop,
                      const struct rtr_record_config *config, struct tow_err *err);
/* After the loop has run to its end: records under way are written by then. NULL is fine. */
void rtr_recorder_free(struct rtr_recorder *r);

#endif
