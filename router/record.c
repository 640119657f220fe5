/* router/record.c - see record.h.
 *
 *   submit --> LIVE --last choice ended, failed, cancelled--> WAITING --write--> WRITING --> freed
 *                 +-- nothing to keep, no memory --> freed         (loop)      (pool)
 *
 * A record takes its copy of the prompts when the request ends: until then they lie in the
 * request's arena, and outputs grow here. The open folder and the list of its files belong to the
 * write that runs.
 *
 * The folder is held open, and locked by a file in it. Before each write its path is looked at: an
 * operator may have moved it away, removed it or mounted something over it, and what was held open
 * would then take records that nobody finds.
 */
#include "router/record.h"

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/list.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/text/record.h"
#include "proto/messages.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <uv.h>

enum {
    NAME = TEXT_RECORD_MAX_ID + 8,
    SAY_AGAIN_S = 60,
    MAX_FILES_READ = 4 << 20,
    PROBE_BYTES = 4096
};

static const char lock_name[] = ".lock", probe_name[] = ".probe.tmp";

struct file {
    char name[NAME];
    uint64_t bytes;
    int64_t changed_ns; /* only to sort what was there at start */
};

struct output {
    int32_t *ids; /* owned */
    uint32_t n, cap;
    struct text_record_attempt *attempts; /* owned */
    uint32_t n_attempts, attempts_cap;
    const char *finish; /* NULL while it goes on */
};

/* A request on its way, as rtr_backend's callers see it; then what waits to be written. */
struct rtr_accepted {
    struct rtr_recorder *recorder;
    struct rtr_accepted *inner; /* the other back end's, never looked into */
    struct rtr_sink sink;
    void *ctx;
    const struct rtr_request *req; /* borrowed until the end */
    uint32_t n_left, n_choices;
    bool no_memory;
    struct text_record_worker *workers; /* owned; their texts are in record.arena */
    uint32_t n_workers, workers_cap;
    /* from the end on */
    struct tow_list link;
    struct text_record record;
    size_t bytes; /* of ids: what the queue is bounded by */
    struct output outputs[];
};

enum outcome { WRITTEN, TOO_LARGE, FAILED };

struct rtr_recorder {
    struct uv_loop_s *loop; /* borrowed */
    struct rtr_backend inner;
    void *inner_self;    /* borrowed */
    int dir_fd, lock_fd; /* -1: no folder is open */
    uint32_t mode, max_requests, n_vocab, n_eos;
    uint64_t max_bytes;
    char *dir, *model; /* owned */
    int32_t *eos;      /* owned */
    struct tow_list queue;
    uint32_t n_queued;
    size_t queued_bytes;
    bool writing;
    /* of the write that runs */
    uv_work_t work;
    struct rtr_accepted *now;
    enum outcome outcome;
    struct tow_err error;
    struct file *files; /* [n_files] from first on, oldest first; owned */
    uint32_t first, n_files, files_cap;
    uint64_t files_bytes;
    uint64_t n_removed;
    uint64_t said_s; /* when a failure was last logged */

    struct tow_counter *m_recorded, *m_full, *m_too_large, *m_failed, *m_removed;
    struct tow_gauge *m_files, *m_bytes;
};

int rtr_record_mode(const char *text, const char *what, uint32_t *mode, struct tow_err *err)
{
    char *end;
    unsigned long v = strtoul(text, &end, 8);
    if (!*text || *end || text[0] < '0' || text[0] > '7' || v > 0777)
        return tow_fail(err, TOW_ECONFIG, "%s '%s': must be an octal mode from 0600 to 0664", what,
                        text);
    if (v & 0002)
        return tow_fail(err, TOW_ECONFIG,
                        "%s %s: everybody could write to records; right are 0600 to 0664", what,
                        text);
    if ((v & 0600) != 0600 || v & 0111)
        return tow_fail(err, TOW_ECONFIG,
                        "%s %s: the owner must be able to read and write and nobody to execute; "
                        "right are 0600 to 0664",
                        what, text);
    *mode = (uint32_t)v;
    return 0;
}

/* ------------------------------------------------------------------ files (pool thread) */

/* A regular file that begins as records do; *st is then filled. Nothing else in the folder is
 * counted or removed, whatever its name. */
static bool is_record(const struct rtr_recorder *r, const char *name, struct stat *st)
{
    char begins[sizeof TEXT_RECORD_BEGINS - 1];
    int fd = openat(r->dir_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) return false;
    bool is = fstat(fd, st) == 0 && S_ISREG(st->st_mode) &&
              pread(fd, begins, sizeof begins, 0) == (ssize_t)sizeof begins &&
              memcmp(begins, TEXT_RECORD_BEGINS, sizeof begins) == 0;
    close(fd);
    return is;
}

static void drop_oldest(struct rtr_recorder *r)
{
    const struct file *f = &r->files[r->first++];
    struct stat st;
    r->files_bytes -= f->bytes;
    r->n_files--;
    if (!is_record(r, f->name, &st)) return; /* somebody took it away, or put another there */
    if (unlinkat(r->dir_fd, f->name, 0) < 0)
        tow_warn("--record-dir %s: %s cannot be removed: %m", r->dir, f->name);
    r->n_removed++;
}

static void make_room(struct rtr_recorder *r, uint32_t more, uint64_t bytes)
{
    while (r->n_files > 0 &&
           (r->n_files + more > r->max_requests || r->files_bytes + bytes > r->max_bytes))
        drop_oldest(r);
}

static int keep(struct rtr_recorder *r, const char *name, uint64_t bytes)
{
    if (r->first > 64 && r->first > r->n_files) { /* the front half is free: use it again */
        memmove(r->files, r->files + r->first, r->n_files * sizeof *r->files);
        r->first = 0;
    }
    void *more = tow_grow(r->files, r->first + r->n_files, &r->files_cap, 64, sizeof *r->files);
    if (!more) return TOW_ENOMEM;
    r->files = more;
    struct file *f = &r->files[r->first + r->n_files++];
    *f = (struct file){.bytes = bytes};
    snprintf(f->name, sizeof f->name, "%s", name);
    r->files_bytes += bytes;
    return 0;
}

static bool write_all(int fd, const char *at, size_t n)
{
    while (n > 0) {
        ssize_t got = write(fd, at, n);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += got;
        n -= (size_t)got;
    }
    return true;
}

/* A new file of our mode with these bytes, or none. */
static int write_new(struct rtr_recorder *r, const char *name, const char *bytes, size_t n,
                     bool sync, struct tow_err *err)
{
    unlinkat(r->dir_fd, name, 0); /* of a run that was killed */
    int fd = openat(r->dir_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return tow_fail(err, TOW_EIO, "--record-dir %s: %s: %m", r->dir, name);
    /* fchmod: the umask has no say. */
    bool good = fchmod(fd, r->mode) == 0 && write_all(fd, bytes, n) && (!sync || fsync(fd) == 0);
    int why = errno;
    if (close(fd) < 0 && good) good = false, why = errno;
    if (good) return 0;
    unlinkat(r->dir_fd, name, 0);
    return tow_fail(err, TOW_EIO, "--record-dir %s: %s: %s", r->dir, name, strerror(why));
}

static int write_file(struct rtr_recorder *r, const char *name, const char *bytes, size_t n,
                      struct tow_err *err)
{
    char tmp[NAME + 8];
    snprintf(tmp, sizeof tmp, ".%s.tmp", name);
    int rc = write_new(r, tmp, bytes, n, false, err);
    if (rc < 0 || renameat(r->dir_fd, tmp, r->dir_fd, name) == 0) return rc;
    rc = tow_fail(err, TOW_EIO, "--record-dir %s: %s: %m", r->dir, name);
    unlinkat(r->dir_fd, tmp, 0);
    return rc;
}

/* chatcmpl-... or cmpl-..., and what follows. */
static bool is_ours(const char *name, const char *suffix)
{
    char id[TEXT_RECORD_MAX_ID + 1];
    const size_t n = strlen(name), m = strlen(suffix);
    if (n <= m || n - m > TEXT_RECORD_MAX_ID || strcmp(name + n - m, suffix) != 0) return false;
    snprintf(id, sizeof id, "%.*s", (int)(n - m), name);
    return text_record_id_ok(id) && (!strncmp(id, "chatcmpl-", 9) || !strncmp(id, "cmpl-", 5));
}

static int by_age(const void *a, const void *b)
{
    const struct file *x = a, *y = b;
    if (x->changed_ns != y->changed_ns) return x->changed_ns < y->changed_ns ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* Files of earlier runs count; what a killed run left half written goes. */
static int take_over(struct rtr_recorder *r, struct tow_err *err)
{
    int fd = openat(r->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d) {
        if (fd >= 0) close(fd);
        return tow_fail(err, TOW_ECONFIG, "--record-dir %s: cannot be read: %m", r->dir);
    }
    int rc = 0;
    for (const struct dirent *e; rc == 0 && (e = readdir(d));) {
        struct stat st;
        if (e->d_name[0] == '.' && is_ours(e->d_name + 1, TEXT_RECORD_SUFFIX ".tmp") &&
            is_record(r, e->d_name, &st))
            unlinkat(r->dir_fd, e->d_name, 0);
        if (!is_ours(e->d_name, TEXT_RECORD_SUFFIX) || !is_record(r, e->d_name, &st)) continue;
        if (r->n_files == MAX_FILES_READ)
            rc = tow_fail(err, TOW_ECONFIG, "--record-dir %s: more than %d records", r->dir,
                          MAX_FILES_READ);
        else if ((rc = keep(r, e->d_name, (uint64_t)st.st_size)) < 0)
            tow_fail(err, rc, "--record-dir %s: out of memory", r->dir);
        else
            r->files[r->n_files - 1].changed_ns =
                (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    }
    closedir(d);
    if (rc == 0 && r->n_files > 0) qsort(r->files, r->n_files, sizeof *r->files, by_age);
    if (rc == 0) make_room(r, 0, 0);
    return rc;
}

/* *fd is -1 or the caller's, whatever comes back. */
static int open_checked(const char *dir, int *fd, struct tow_err *err)
{
    struct stat st;
    *fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*fd < 0 || fstat(*fd, &st) < 0)
        return tow_fail(err, TOW_ECONFIG, "--record-dir %s: %m", dir);
    if (st.st_uid != geteuid() && st.st_uid != 0)
        return tow_fail(err, TOW_ECONFIG,
                        "--record-dir %s: belongs to user %u; must belong to root or to user %u, "
                        "whom the router runs as",
                        dir, (unsigned)st.st_uid, (unsigned)geteuid());
    if (st.st_mode & 0022)
        return tow_fail(
            err, TOW_ECONFIG, "--record-dir %s: mode %04o: %s may write there; 0700 is meant", dir,
            (unsigned)st.st_mode & 07777, st.st_mode & 0002 ? "everybody" : "its group");
    return 0;
}

static void close_dir(struct rtr_recorder *r)
{
    if (r->lock_fd >= 0) close(r->lock_fd);
    if (r->dir_fd >= 0) close(r->dir_fd);
    r->lock_fd = r->dir_fd = -1;
    r->first = r->n_files = 0;
    r->files_bytes = 0;
}

/* The lock goes with the process, however it ends. */
static int lock_dir(struct rtr_recorder *r, struct tow_err *err)
{
    r->lock_fd = openat(r->dir_fd, lock_name,
                        O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0600);
    if (r->lock_fd >= 0 && flock(r->lock_fd, LOCK_EX | LOCK_NB) == 0) return 0;
    if (r->lock_fd >= 0 && errno == EWOULDBLOCK)
        return tow_fail(err, TOW_ECONFIG,
                        "--record-dir %s: another router records there (%s is locked); each needs "
                        "a folder of its own",
                        r->dir, lock_name);
    return tow_fail(err, TOW_ECONFIG, "--record-dir %s: %s: %m", r->dir, lock_name);
}

/* Nothing is open before; nor is it after a failure. */
static int open_dir(struct rtr_recorder *r, struct tow_err *err)
{
    static const char probe[PROBE_BYTES];
    int rc = open_checked(r->dir, &r->dir_fd, err);
    if (rc == 0) rc = lock_dir(r, err);
    if (rc == 0 && write_new(r, probe_name, probe, sizeof probe, true, err) < 0)
        rc = err->code = TOW_ECONFIG;
    if (rc == 0) {
        unlinkat(r->dir_fd, probe_name, 0);
        rc = take_over(r, err);
    }
    if (rc < 0) close_dir(r);
    return rc;
}

/* Another folder than the open one may stand under its name by now, or none. It is not made again:
 * what is missing may be a volume. */
static int follow_dir(struct rtr_recorder *r, struct tow_err *err)
{
    struct stat named, held;
    const bool there = stat(r->dir, &named) == 0;
    if (there && r->dir_fd >= 0 && fstat(r->dir_fd, &held) == 0 && named.st_ino == held.st_ino &&
        named.st_dev == held.st_dev)
        return 0;
    const int why = errno;
    close_dir(r);
    if (!there && why == ENOENT)
        return tow_fail(err, TOW_EIO,
                        "--record-dir %s: the folder is gone; recording goes on once it is made "
                        "again",
                        r->dir);
    if (!there) return tow_fail(err, TOW_EIO, "--record-dir %s: %s", r->dir, strerror(why));
    int rc = open_dir(r, err);
    if (rc == 0)
        tow_warn("--record-dir %s: another folder stands there now; recording goes on in it, %u "
                 "records were there",
                 r->dir, r->n_files);
    return rc;
}

static void write_now(uv_work_t *work)
{
    struct rtr_recorder *r = work->data;
    struct tow_buf b;
    char name[NAME];
    tow_buf_init(&b, TEXT_RECORD_MAX_BYTES);
    text_record_put(&b, &r->now->record);
    if (tow_buf_failed(&b) || b.len > r->max_bytes) {
        r->outcome = TOO_LARGE;
    } else if (follow_dir(r, &r->error) < 0) {
        r->outcome = FAILED;
    } else {
        make_room(r, 1, b.len);
        snprintf(name, sizeof name, "%s" TEXT_RECORD_SUFFIX, r->now->record.id);
        int rc = write_file(r, name, b.data, b.len, &r->error);
        if (rc == 0 && keep(r, name, b.len) < 0) {
            unlinkat(r->dir_fd, name, 0); /* nobody would ever remove it */
            rc = tow_fail(&r->error, TOW_ENOMEM, "--record-dir %s: out of memory", r->dir);
        }
        r->outcome = rc < 0 ? FAILED : WRITTEN;
    }
    tow_buf_fini(&b);
}

/* ------------------------------------------------------------------ the queue (loop) */

static void free_accepted(struct rtr_accepted *t)
{
    for (uint32_t i = 0; i < t->n_choices; i++) {
        free(t->outputs[i].ids);
        free(t->outputs[i].attempts);
    }
    free(t->workers);
    text_record_fini(&t->record);
    free(t);
}

static void write_next(struct rtr_recorder *r);

static void on_written(uv_work_t *work, int status)
{
    struct rtr_recorder *r = work->data;
    (void)status; /* nobody cancels it */
    r->writing = false;
    tow_counter_follow(r->m_removed, r->n_removed);
    tow_gauge_set(r->m_files, r->n_files);
    tow_gauge_set(r->m_bytes, (double)r->files_bytes);
    tow_counter_add(r->outcome == WRITTEN     ? r->m_recorded
                    : r->outcome == TOO_LARGE ? r->m_too_large
                                              : r->m_failed,
                    1);
    if (r->outcome == FAILED && (!r->said_s || tow_wall_s() - r->said_s >= SAY_AGAIN_S)) {
        tow_warn("req %s: not recorded: %s", r->now->record.id, r->error.msg);
        r->said_s = tow_wall_s();
    }
    r->queued_bytes -= r->now->bytes;
    free_accepted(r->now);
    write_next(r);
}

static void write_next(struct rtr_recorder *r)
{
    if (r->writing || tow_list_empty(&r->queue)) return;
    r->now = TOW_CONTAINER(r->queue.next, struct rtr_accepted, link);
    tow_list_remove(&r->now->link);
    r->n_queued--;
    r->writing = true;
    r->work.data = r;
    uv_queue_work(r->loop, &r->work, write_now, on_written);
}

/* Ids of t->req into the record; each different prompt once. False: out of memory. */
static bool take_prompts(struct rtr_accepted *t, struct text_record_choice *choices)
{
    const struct rtr_request *q = t->req;
    struct tow_arena *a = &t->record.arena;
    struct text_record_ids *prompts = tow_arena_alloc(a, q->n_choices * sizeof *prompts);
    if (!prompts) return false;
    for (uint32_t i = 0, n = 0; i < q->n_choices; i++) {
        const struct rtr_choice *c = &q->choices[i];
        choices[i].prompt = n;
        if (i > 0 && c->prompt == q->choices[i - 1].prompt) {
            choices[i].prompt = n - 1; /* choices of one prompt stand side by side */
            continue;
        }
        int32_t *ids = tow_arena_alloc(a, (c->n_prompt ? c->n_prompt : 1) * sizeof *ids);
        if (!ids) return false;
        memcpy(ids, c->prompt, c->n_prompt * sizeof *ids);
        prompts[n++] = (struct text_record_ids){ids, c->n_prompt};
        t->record.n_prompts = n;
    }
    t->record.prompts = prompts;
    return true;
}

static bool take_sampling(struct rtr_accepted *t)
{
    const struct rtr_sampling *s = &t->req->sampling;
    struct text_record *r = &t->record;
    struct text_record_bias *bias =
        tow_arena_alloc(&r->arena, (s->n_bias ? s->n_bias : 1) * sizeof *bias);
    if (!bias) return false;
    for (uint32_t i = 0; i < s->n_bias; i++)
        bias[i] = (struct text_record_bias){s->bias[i].id, s->bias[i].bias};
    r->bias = bias;
    r->n_bias = s->n_bias;
    r->temperature = s->temperature;
    r->top_p = s->top_p;
    r->min_p = s->min_p;
    r->top_k = s->top_k;
    r->frequency_penalty = s->frequency_penalty;
    r->presence_penalty = s->presence_penalty;
    r->repetition_penalty = s->repetition_penalty;
    r->ignore_eos = s->ignore_eos;
    r->index_topk = s->index_topk;
    r->max_tokens = t->req->max_tokens;
    return true;
}

static bool build(struct rtr_accepted *t)
{
    const struct rtr_recorder *r = t->recorder;
    struct text_record *rec = &t->record;
    struct text_record_choice *choices =
        tow_arena_alloc(&rec->arena, t->n_choices * sizeof *choices);
    rec->id = tow_arena_strndup(&rec->arena, t->req->id, strlen(t->req->id));
    if (!choices || !rec->id || !take_prompts(t, choices) || !take_sampling(t)) return false;
    for (uint32_t i = 0; i < t->n_choices; i++) {
        const struct output *o = &t->outputs[i];
        choices[i].seed = t->req->choices[i].seed;
        choices[i].finish = o->finish;
        choices[i].output = (struct text_record_ids){o->ids, o->n};
        choices[i].attempts = o->attempts;
        choices[i].n_attempts = o->n_attempts;
    }
    rec->choices = choices;
    rec->n_choices = t->n_choices;
    rec->workers = t->workers;
    rec->n_workers = t->n_workers;
    rec->created = tow_wall_s();
    rec->model = r->model;
    rec->n_vocab = r->n_vocab;
    rec->eos = (struct text_record_ids){r->eos, r->n_eos};
    return true;
}

static bool worth_keeping(const struct rtr_accepted *t)
{
    for (uint32_t i = 0; i < t->n_choices; i++) {
        const char *f = t->outputs[i].finish;
        if (t->outputs[i].n > 0 || (strcmp(f, "failed") != 0 && strcmp(f, "cancelled") != 0))
            return true;
    }
    return false;
}

/* The request is over; t is freed or queued. */
static void end(struct rtr_accepted *t, const char *finish)
{
    struct rtr_recorder *r = t->recorder;
    for (uint32_t i = 0; i < t->n_choices; i++) {
        if (!t->outputs[i].finish) t->outputs[i].finish = finish;
        t->bytes += (t->outputs[i].n + t->req->choices[i].n_prompt) * sizeof(int32_t);
    }
    bool full = r->n_queued >= RTR_RECORD_QUEUE ||
                (r->queued_bytes && r->queued_bytes + t->bytes > RTR_RECORD_QUEUE_BYTES);
    if (!worth_keeping(t)) {
        free_accepted(t);
        return;
    }
    if (full || t->no_memory || !build(t)) {
        tow_counter_add(full ? r->m_full : r->m_failed, 1);
        free_accepted(t);
        return;
    }
    t->req = NULL;
    r->n_queued++;
    r->queued_bytes += t->bytes;
    tow_list_append(&r->queue, &t->link);
    write_next(r);
}

/* ------------------------------------------------------------------ what comes up */

static void on_tokens(void *ctx, const struct rtr_tokens *m)
{
    struct rtr_accepted *t = ctx;
    struct output *o = &t->outputs[m->choice];
    if (!t->no_memory && o->n + m->n > o->cap) {
        uint32_t cap = o->n + m->n + (o->n + m->n) / 2 + 64;
        int32_t *more = realloc(o->ids, cap * sizeof *more);
        t->no_memory = !more;
        if (more) o->ids = more, o->cap = cap;
    }
    for (uint32_t i = 0; !t->no_memory && i < m->n; i++) o->ids[o->n++] = m->ids[i];
    t->sink.on_tokens(t->ctx, m); /* may end t */
}

static void on_finish(void *ctx, uint32_t choice, enum rtr_finish reason)
{
    struct rtr_accepted *t = ctx;
    const struct rtr_sink sink = t->sink;
    void *sink_ctx = t->ctx;
    if (!t->outputs[choice].finish)
        t->outputs[choice].finish = reason == RTR_FINISH_STOP ? "stop" : "length";
    if (--t->n_left == 0) end(t, "");
    sink.on_finish(sink_ctx, choice, reason);
}

static void on_fail(void *ctx, const struct rtr_refusal *refusal)
{
    struct rtr_accepted *t = ctx;
    const struct rtr_sink sink = t->sink;
    void *sink_ctx = t->ctx;
    end(t, "failed");
    sink.on_fail(sink_ctx, refusal);
}

static void on_captured(void *ctx, const struct rtr_captured *c)
{
    struct rtr_accepted *t = ctx;
    t->sink.on_captured(t->ctx, c);
}

static char *text_of(struct rtr_accepted *t, struct wire_text s)
{
    return tow_arena_strndup(&t->record.arena, s.data, s.len);
}

/* The worker's place among those of the record, or UINT32_MAX. */
static uint32_t worker_of(struct rtr_accepted *t, const struct rtr_placed_worker *w,
                          const char *role)
{
    for (uint32_t i = 0; i < t->n_workers; i++)
        if (t->workers[i].incarnation == w->incarnation && !strcmp(t->workers[i].name, w->name))
            return i;
    if (t->n_workers == TEXT_RECORD_MAX_WORKERS) return UINT32_MAX;
    void *more = tow_grow(t->workers, t->n_workers, &t->workers_cap, 4, sizeof *t->workers);
    if (!more) return UINT32_MAX;
    t->workers = more;

    const struct wire_bytes facts = {w->facts, w->facts_bytes};
    struct wire_fact f;
    struct text_record_worker to = {
        .role = role, .incarnation = w->incarnation, .chunk_tokens = w->chunk_tokens};
    struct tow_arena *arena = &t->record.arena;
    to.name = tow_arena_strndup(arena, w->name, strlen(w->name));
    to.facts = tow_arena_alloc(arena, TEXT_RECORD_MAX_FACTS * sizeof *to.facts);
    if (!to.name || !to.facts) return UINT32_MAX;
    for (size_t at = 0; to.n_facts < TEXT_RECORD_MAX_FACTS && wire_next_fact(facts, &at, &f);) {
        const char **pair = to.facts[to.n_facts++];
        pair[0] = text_of(t, f.field);
        pair[1] = text_of(t, f.value);
        if (!pair[0] || !pair[1]) return UINT32_MAX;
    }
    t->workers[t->n_workers] = to;
    return t->n_workers++;
}

static void on_placed(void *ctx, const struct rtr_placed *p)
{
    struct rtr_accepted *t = ctx;
    struct output *o = &t->outputs[p->choice];
    struct text_record_attempt a = {.first_output = p->n_output,
                                    .prefill = worker_of(t, &p->prefill, "prefill"),
                                    .decode = worker_of(t, &p->decode, "decode")};
    void *more = tow_grow(o->attempts, o->n_attempts, &o->attempts_cap, 4, sizeof *o->attempts);
    if (more) o->attempts = more;
    if (more && a.prefill != UINT32_MAX && a.decode != UINT32_MAX &&
        o->n_attempts < TEXT_RECORD_MAX_ATTEMPTS)
        o->attempts[o->n_attempts++] = a;
    else
        t->no_memory = true;
    if (t->sink.on_placed) t->sink.on_placed(t->ctx, p);
}

static const struct rtr_sink recording = {on_tokens, on_finish, on_fail, on_captured, on_placed};

/* ------------------------------------------------------------------ what goes down */

static int room(void *self, struct rtr_refusal *refusal)
{
    struct rtr_recorder *r = self;
    return r->inner.room(r->inner_self, refusal);
}

static int submit(void *self, const struct rtr_request *req, const struct rtr_sink *sink, void *ctx,
                  struct rtr_accepted **out, struct rtr_refusal *refusal)
{
    struct rtr_recorder *r = self;
    struct rtr_accepted *t = calloc(1, sizeof *t + req->n_choices * sizeof t->outputs[0]);
    if (!t) {
        memset(refusal, 0, sizeof *refusal);
        return tow_fail(&refusal->err, TOW_ENOMEM, "no memory for a request");
    }
    t->recorder = r;
    t->sink = *sink;
    t->ctx = ctx;
    t->req = req;
    t->n_left = t->n_choices = req->n_choices;
    tow_list_init(&t->link);
    tow_arena_init(&t->record.arena, 0);
    int rc = r->inner.submit(r->inner_self, req, &recording, t, &t->inner, refusal);
    if (rc < 0)
        free_accepted(t);
    else
        *out = t;
    return rc;
}

static void cancel(void *self, struct rtr_accepted *t)
{
    struct rtr_recorder *r = self;
    r->inner.cancel(r->inner_self, t->inner);
    end(t, "cancelled");
}

static bool cancel_choice(void *self, struct rtr_accepted *t, uint32_t choice)
{
    struct rtr_recorder *r = self;
    bool over = r->inner.cancel_choice(r->inner_self, t->inner, choice);
    t->outputs[choice].finish = "stop_string";
    if (over && --t->n_left == 0) end(t, "");
    return over;
}

static bool ready(void *self, const char **why)
{
    struct rtr_recorder *r = self;
    return r->inner.ready(r->inner_self, why);
}

static uint32_t context_length(void *self, bool shadow)
{
    struct rtr_recorder *r = self;
    return r->inner.context_length(r->inner_self, shadow);
}

static void workers_json(void *self, struct tow_buf *out)
{
    struct rtr_recorder *r = self;
    r->inner.workers_json(r->inner_self, out);
}

static void refused_json(void *self, struct tow_buf *out)
{
    struct rtr_recorder *r = self;
    r->inner.refused_json(r->inner_self, out);
}

static int drain_worker(void *self, const char *name, struct tow_err *err)
{
    struct rtr_recorder *r = self;
    return r->inner.drain_worker(r->inner_self, name, err);
}

static void metrics(void *self, struct tow_buf *out)
{
    struct rtr_recorder *r = self;
    if (r->inner.metrics) r->inner.metrics(r->inner_self, out);
}

const struct rtr_backend rtr_recorder_backend = {.room = room,
                                                 .submit = submit,
                                                 .cancel = cancel,
                                                 .cancel_choice = cancel_choice,
                                                 .ready = ready,
                                                 .context_length = context_length,
                                                 .workers_json = workers_json,
                                                 .refused_json = refused_json,
                                                 .drain_worker = drain_worker,
                                                 .metrics = metrics};

/* ------------------------------------------------------------------ opening */

int rtr_record_check_dir(const char *dir, struct tow_err *err)
{
    int fd = -1, rc = 0;
    struct stat st;
    if (lstat(dir, &st) < 0 && errno == ENOENT) { /* mkdir would have to make it */
        char *copy = strdup(dir);
        if (!copy) return tow_fail(err, TOW_ENOMEM, "--record-dir: out of memory");
        if (faccessat(AT_FDCWD, dirname(copy), W_OK | X_OK, AT_EACCESS) < 0)
            rc = tow_fail(err, TOW_ECONFIG, "--record-dir %s: cannot be made: %m", dir);
        free(copy);
        return rc;
    }
    rc = open_checked(dir, &fd, err);
    if (rc == 0 && faccessat(fd, ".", W_OK | X_OK, AT_EACCESS) < 0)
        rc = tow_fail(err, TOW_ECONFIG, "--record-dir %s: cannot be written to: %m", dir);
    if (fd >= 0) close(fd);
    return rc;
}

static void register_metrics(struct rtr_recorder *r, struct tow_metrics *m)
{
    static const char dropped[] = "router_record_dropped_total";
    static const char why[] = "Requests that could not be recorded, by reason";
    r->m_recorded = tow_counter(m, "router_recorded_total", "Requests recorded to disk", NULL);
    r->m_full = tow_counter(m, dropped, why, (const char *[]){"reason", "queue_full", NULL});
    r->m_too_large = tow_counter(m, dropped, why, (const char *[]){"reason", "too_large", NULL});
    r->m_failed = tow_counter(m, dropped, why, (const char *[]){"reason", "failed", NULL});
    r->m_removed = tow_counter(m, "router_record_removed_total",
                               "Recorded requests removed to make room", NULL);
    r->m_files = tow_gauge(m, "router_record_files", "Recorded requests on disk", NULL);
    r->m_bytes = tow_gauge(m, "router_record_bytes", "Bytes of them", NULL);
    tow_counter_follow(r->m_removed, r->n_removed);
    tow_gauge_set(r->m_files, r->n_files);
    tow_gauge_set(r->m_bytes, (double)r->files_bytes);
}

int rtr_recorder_open(struct rtr_recorder **out, struct uv_loop_s *loop,
                      const struct rtr_record_config *c, struct tow_err *err)
{
    struct rtr_recorder *r = calloc(1, sizeof *r);
    bool good = true;
    if (!r) return tow_fail(err, TOW_ENOMEM, "recorder: out of memory");
    r->loop = loop;
    r->inner = *c->inner;
    r->inner_self = c->inner_self;
    r->dir_fd = r->lock_fd = -1;
    r->mode = c->mode;
    r->max_bytes = c->max_bytes;
    r->max_requests = c->max_requests;
    r->n_vocab = c->n_vocab;
    r->n_eos = c->n_eos;
    tow_list_init(&r->queue);
    r->dir = strdup(c->dir);
    r->model = strdup(c->model);
    r->eos = tow_copy(c->eos, c->n_eos * sizeof *c->eos, &good);
    int rc = 0;
    if (!r->dir || !r->model || !good)
        rc = tow_fail(err, TOW_ENOMEM, "recorder: out of memory");
    else if (mkdir(r->dir, 0700) < 0 && errno != EEXIST)
        rc = tow_fail(err, TOW_ECONFIG, "--record-dir %s: cannot be made: %m", r->dir);
    if (rc == 0) rc = open_dir(r, err);
    if (rc < 0) {
        rtr_recorder_free(r);
        return rc;
    }
    register_metrics(r, c->metrics);
    *out = r;
    return 0;
}

void rtr_recorder_free(struct rtr_recorder *r)
{
    if (!r) return;
    tow_assert(!r->writing && tow_list_empty(&r->queue));
    close_dir(r);
    free(r->files);
    free(r->dir);
    free(r->model);
    free(r->eos);
    free(r);
}
