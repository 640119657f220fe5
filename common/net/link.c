/* net/link.c - UCX behind a queue: what it reports inside of progress is noted and told afterwards.
 *
 * How      One context, one worker (thread mode single), features AM, RMA and WAKEUP. UCX calls
 *          back in the middle of ucp_worker_progress(), where nothing may be closed; so each
 *          callback only puts a note on `notes`, and net_link_progress() works the notes off when
 *          UCX has returned. Endpoints are made from worker addresses in peer error mode: a dead
 *          peer then ends every operation with an error, over shared memory and TCP alike.
 *
 * UCX      Peer error mode quietly drops shared memory, whose transports by default do not claim to
 *          notice a dead peer: they do notice (keep-alive looks at the process), so their error
 *          handling is switched on (net_link_setup). Keep-alive runs each second instead of 20.
 *          Puts over TCP collapse with size, so nothing here puts: bytes are read (get) or received
 *          as rendezvous messages. In peer error mode those come in pieces over TCP, through
 *          buffers of UCX's; net_bulk_copy() lends it a datatype whose unpacking also digests.
 *
 * Sleeping Transports report through one event descriptor, which may be slept on only after
 *          ucp_worker_arm() said that nothing is pending. Events are dear while bytes move, so with
 *          operations in flight we poll, yielding the core; after SPIN_US without any progress the
 *          thread sleeps on the descriptor for at most a millisecond. With nothing in flight it
 *          always sleeps. UCX 1.12 could leave the descriptor signalled for ever: after EMPTY_MAX
 *          wake-ups in a row that brought nothing, it is looked at only once a millisecond.
 *
 * Places   Shared memory reaches from one network namespace into another, its wake-ups do not (they
 *          are abstract sockets, which end at the namespace), so a sleeping peer would never hear.
 *          The address we hand out therefore says which namespace we are in and holds UCX's address
 *          twice, whole and with network devices only; net_ep_open() takes the one that fits.
 *
 * Stuck    In shared memory all senders write into one queue of the receiver, in order: a sender
 *          that is killed between taking a slot and filling it (seen with UCX 1.13 while its first
 *          message goes out) leaves a queue that never moves again, and nothing reports it. Only a
 *          new worker has a new queue; net_link_reopen() makes one. Registered memory belongs to
 *          the context and stays.
 *
 * Named    Whatever goes by rendezvous or is read from or to our registered memory says so
 *          (name_region). UCX 1.16 and later otherwise find that memory in their cache of
 *          registrations, if they have one, and a rendezvous that is cancelled ends only when
 *          nobody refers to the cached one any more: our registration does, until ucp_mem_unmap().
 *          It would stay in flight for ever, and its callback be made then, when the worker is
 *          gone.
 *
 * Rejected One thread-safe worker shared with the control thread: a lock across every UCX call, and
 *          UCX callbacks on whichever thread happened to progress. libuv around UCX's descriptor:
 *          three handles (poll, prepare, idle) that must agree, for a thread that has nothing else
 *          to wait for.
 */
#include "common/net/link.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/fault.h"
#include "common/base/hash.h"
#include "common/base/list.h"
#include "common/base/log.h"
#include "common/net/shm.h"
#include "proto/messages.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

/* Of ucs/config/global_opts.h, a header that not every package installs. */
ucs_status_t ucs_global_opts_set_value(const char *name, const char *value);

#if UCP_API_VERSION < UCP_VERSION(1, 12)
#error "UCX 1.12 or later is needed"
#endif

enum { AM_MESSAGE = 1, AM_BULK = 2 }; /* active message ids */
enum { HEAD_BYTES = 16 };             /* before UCX's addresses */
enum { SPIN_US = 100, EMPTY_MAX = 100, PROGRESS_MAX = 64, FREE_MS = 1000, OPS_KEPT = 1024 };

/* Over TCP a bulk message travels in pieces of this many bytes and a header of 5: two of the
 * largest packets that the kernel passes on in one go, 45 segments of 1448 bytes each on Ethernet,
 * which loopback's packets of 64K hold too. UCX's own 64K and header are a little more than one:
 * each piece would drag a small packet behind it, at the price of a large one. */
#define SEGMENT       "UCX_TCP_RX_SEG_SIZE"
#define SEGMENT_BYTES "130315"
/* Of its send buffers, never more than what the other side's receive buffers hold. */
#define SEGMENT_OUT "UCX_TCP_TX_SEG_SIZE"

/* What UCX reported and nobody was told yet. */
enum note_kind { NOTE_OP, NOTE_MESSAGE, NOTE_BULK, NOTE_EP_ERROR, NOTE_EP_CLOSED };
struct note {
    struct tow_list node; /* in link->notes, or linked to itself */
    enum note_kind kind;
};

enum op_kind { OP_SEND, OP_GET, OP_BULK_OUT, OP_BULK_IN };
struct op {
    struct note note;
    enum op_kind kind;
    struct net_link *link;   /* borrowed */
    struct net_ep *ep;       /* borrowed; NULL for OP_BULK_IN */
    struct tow_list in_link; /* link->ops while in flight, link->free_ops when not */
    net_done_fn fn;          /* NULL for OP_SEND */
    void *arg;
    void *copy;                 /* owned: frame or head */
    struct tow_hash_copy *into; /* borrowed: where OP_BULK_IN is copied to; NULL: UCX places it */
    size_t bytes;
    int code;
};

struct message {
    struct note note;
    uint32_t bytes;
    uint8_t frame[];
};

struct net_bulk {
    struct note note;
    struct net_link *link;   /* borrowed */
    struct tow_list in_link; /* link->bulks until taken or refused */
    void *desc;              /* UCX's; NULL once consumed */
    void *eager;             /* owned: the bytes, if UCX sent them at once */
    uint64_t bytes;
    uint32_t head_bytes;
    uint8_t head[];
};

struct net_ep {
    struct note error, closed;
    struct net_link *link;   /* borrowed */
    struct tow_list in_link; /* link->eps */
    struct tow_list rkeys;
    ucp_ep_h ucp;
    void *user;     /* borrowed */
    uint32_t n_ops; /* in flight or not told yet */
    int error_code;
    ucs_status_t error_status;
    bool closing, ucp_closed;
    net_done_fn on_closed;
    void *closed_arg;
};

struct net_rkey {
    struct tow_list in_ep;
    ucp_rkey_h ucp;
};

struct net_region {
    struct tow_list in_link;
    ucp_mem_h memh;
    void *base;
    size_t bytes;
    void *key; /* UCX's */
    size_t key_bytes;
};

struct net_link {
    ucp_context_h context;
    ucp_datatype_t copied; /* bytes that unpack() copies */
    ucp_worker_h worker;
    uint8_t *address; /* owned: a head of HEAD_BYTES, UCX's whole address, its network-only one */
    size_t address_bytes;
    uint64_t place; /* the host and network namespace we are in; 0: unknown */
    int event_fd;
    struct net_link_hooks hooks;
    struct tow_list notes, ops, free_ops, eps, bulks, regions;
    uint32_t n_free_ops;
    uint64_t progress_us; /* when something happened last, while operations are in flight */
    unsigned empty_in_row;
    bool woken;  /* the event descriptor fired since the last progress */
    bool jammed; /* by a test: see is_jammed() */
    struct net_link_stats stats;
};

static int code_of(ucs_status_t s)
{
    switch (s) {
    case UCS_OK: return 0;
    case UCS_ERR_CANCELED: return TOW_ECANCEL;
    case UCS_ERR_NO_MEMORY: return TOW_ENOMEM;
    case UCS_ERR_INVALID_PARAM: return TOW_EINVAL;
    default: return TOW_EPEER;
    }
}

static void post(struct net_link *link, struct note *n)
{
    tow_assert(tow_list_empty(&n->node));
    tow_list_append(&link->notes, &n->node);
}

static void note_init(struct note *n, enum note_kind kind)
{
    tow_list_init(&n->node);
    n->kind = kind;
}

/* --- opening and closing ---------------------------------------------------------------------- */

/* UCX 1.16 and later have other protocols, and these settings for them:
 *
 * SEGMENT_OUT They choose by a model of the network. On links whose speed the system does not tell,
 *             as those of virtual machines and loopback, that is slow, and copying a piece into a
 *             send buffer seems to cost nothing; those have 8K by default, which makes small
 *             pieces: a third of the speed. Earlier releases send out of the pages, a segment at a
 *             time.
 * RCACHE      A cache of registrations needs to hear of memory that is given back, so making a
 *             context patches libc's mmap() and its kin while other threads run. A thread of UCX
 *             1.18 was seen to wait for ever for the lock in there. We have no use for the cache:
 *             all that moves far is in our regions and says so. */
static bool has_new_protocols(void)
{
    unsigned major, minor, release;
    ucp_get_version(&major, &minor, &release);
    return major > 1 || minor >= 16;
}

/* By the environment, because that is where transports look for their settings in all versions
 * (ucp_config_modify() reaches them only in later ones). Settings of UCX as a whole were read
 * before main(); in the environment they would come too late, and be complained of as unused. */
void net_link_setup(void)
{
    static const char *const settings[][2] = {
        {"UCX_POSIX_ERROR_HANDLING", "y"}, {"UCX_SYSV_ERROR_HANDLING", "y"},
        {"UCX_KEEPALIVE_INTERVAL", "1s"},  {"UCX_TCP_SNDBUF", "4M"},
        {"UCX_TCP_RCVBUF", "4M"},          {SEGMENT, SEGMENT_BYTES}};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        setenv(settings[i][0], settings[i][1], 0);
    if (has_new_protocols()) {
        setenv(SEGMENT_OUT, net_link_segment(), 0);
        setenv("UCX_RCACHE_ENABLE", "n", 0);
    }
    /* With UCX_TLS restricted some of these go unused, which is no reason to complain on stdout. */
    ucs_global_opts_set_value("WARN_UNUSED_ENV_VARS", "n");
}

const char *net_link_segment(void)
{
    const char *set = getenv(SEGMENT);
    return set ? set : SEGMENT_BYTES;
}

static ucs_status_t on_am_message(void *arg, const void *header, size_t header_bytes, void *data,
                                  size_t bytes, const ucp_am_recv_param_t *param);
static ucs_status_t on_am_bulk(void *arg, const void *header, size_t header_bytes, void *data,
                               size_t bytes, const ucp_am_recv_param_t *param);

static int make_datatype(struct net_link *link, struct tow_err *err);

static int set_handler(struct net_link *link, unsigned id, ucp_am_recv_callback_t cb,
                       uint32_t flags)
{
    ucp_am_handler_param_t p = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = id,
        .flags = flags,
        .cb = cb,
        .arg = link,
    };
    return ucp_worker_set_am_recv_handler(link->worker, &p) == UCS_OK ? 0 : TOW_ESYS;
}

/* Which network namespace of which running host; 0 when the system does not say. */
static uint64_t find_place(void)
{
    struct {
        char boot[40];
        uint64_t ns;
    } id = {0};
    struct stat st;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, id.boot, sizeof id.boot - 1);
    close(fd);
    if (n <= 0 || stat("/proc/self/ns/net", &st) < 0) return 0;
    id.ns = st.st_ino;
    return tow_hash64(&id, sizeof id);
}

/* Head: place u64, bytes of the whole address u32, 4 bytes that keep the rest aligned. */
static int make_address(struct net_link *link, struct tow_err *err)
{
    ucp_worker_attr_t whole = {.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS};
    ucp_worker_attr_t net = {.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS |
                                           UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS,
                             .address_flags = UCP_WORKER_ADDRESS_FLAG_NET_ONLY};
    ucs_status_t s = ucp_worker_query(link->worker, &whole);
    if (s != UCS_OK)
        return tow_fail(err, TOW_ESYS, "ucx: no worker address: %s", ucs_status_string(s));
    bool twice = ucp_worker_query(link->worker, &net) == UCS_OK;
    /* Too much to send: peers then try the whole one wherever they are. */
    if (twice && HEAD_BYTES + whole.address_length + net.address_length > WIRE_MAX_ADDRESS) {
        ucp_worker_release_address(link->worker, net.address);
        twice = false;
    }
    link->place = find_place();
    link->address_bytes =
        HEAD_BYTES + whole.address_length + (twice ? net.address_length : (size_t)0);
    link->address = calloc(1, link->address_bytes);
    if (link->address) {
        struct wire_writer w = {.data = link->address, .cap = HEAD_BYTES};
        wire_put_u64(&w, link->place);
        wire_put_u32(&w, (uint32_t)whole.address_length);
        memcpy(link->address + HEAD_BYTES, whole.address, whole.address_length);
        if (twice)
            memcpy(link->address + HEAD_BYTES + whole.address_length, net.address,
                   net.address_length);
    }
    ucp_worker_release_address(link->worker, whole.address);
    if (twice) ucp_worker_release_address(link->worker, net.address);
    return link->address ? 0 : tow_fail(err, TOW_ENOMEM, "ucx: no memory for the address");
}

/* The one of the peer's two addresses that reaches from here; NULL: not an address of ours. */
static const uint8_t *pick_address(const struct net_link *link, const uint8_t *address,
                                   size_t bytes)
{
    struct wire_reader r = {.data = address, .len = bytes};
    uint64_t place = wire_get_u64(&r);
    uint32_t whole = wire_get_u32(&r);
    if (r.failed || bytes <= HEAD_BYTES || whole == 0 || whole > bytes - HEAD_BYTES) return NULL;
    bool apart = place && link->place && place != link->place;
    return address + HEAD_BYTES + (apart && bytes - HEAD_BYTES > whole ? whole : 0);
}

/* What is set on success: worker, address, event descriptor. On failure nothing is touched. */
static int open_worker(struct net_link *link, struct tow_err *err)
{
    struct net_link was = *link;
    ucp_worker_params_t wp = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                              .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucs_status_t s = ucp_worker_create(link->context, &wp, &link->worker);
    if (s != UCS_OK) {
        struct net_shm shm;
        char why[400];
        net_shm_look(&shm);
        net_shm_explain_worker(&shm, why, sizeof why);
        if (why[0]) return tow_fail(err, TOW_ECONFIG, "%s", why);
        return tow_fail(err, TOW_ESYS, "ucx: no worker: %s", ucs_status_string(s));
    }
    if (make_address(link, err) < 0) goto destroy;
    s = ucp_worker_get_efd(link->worker, &link->event_fd);
    if (s != UCS_OK) {
        tow_fail(err, TOW_ESYS, "ucx: no event descriptor: %s", ucs_status_string(s));
        goto release;
    }
    if (set_handler(link, AM_MESSAGE, on_am_message, UCP_AM_FLAG_WHOLE_MSG) < 0 ||
        set_handler(link, AM_BULK, on_am_bulk, UCP_AM_FLAG_WHOLE_MSG) < 0) {
        tow_fail(err, TOW_ESYS, "ucx: active messages are refused");
        goto release;
    }
    return 0;

release:
    free(link->address);
destroy:
    ucp_worker_destroy(link->worker);
    link->worker = was.worker;
    link->address = was.address;
    link->address_bytes = was.address_bytes;
    link->event_fd = was.event_fd;
    return err ? err->code : TOW_ESYS;
}

int net_link_open(struct net_link **out, const struct net_link_hooks *hooks, struct tow_err *err)
{
    struct net_link *link = calloc(1, sizeof *link);
    if (!link) return tow_fail(err, TOW_ENOMEM, "ucx: no memory for the link");
    link->hooks = *hooks;
    tow_list_init(&link->notes);
    tow_list_init(&link->ops);
    tow_list_init(&link->free_ops);
    tow_list_init(&link->eps);
    tow_list_init(&link->bulks);
    tow_list_init(&link->regions);

    ucp_config_t *config;
    ucs_status_t s = ucp_config_read(NULL, NULL, &config);
    if (s != UCS_OK) {
        tow_fail(err, TOW_ECONFIG, "ucx: bad UCX_ setting: %s", ucs_status_string(s));
        goto free_link;
    }
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_AM | UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP};
    s = ucp_init(&params, config, &link->context);
    ucp_config_release(config);
    if (s != UCS_OK) {
        tow_fail(err, TOW_ECONFIG, "ucx: no usable transport: %s (see UCX_TLS, UCX_NET_DEVICES)",
                 ucs_status_string(s));
        goto free_link;
    }
    if (make_datatype(link, err) < 0) goto cleanup;
    if (open_worker(link, err) < 0) goto destroy;
    *out = link;
    return 0;

destroy:
    ucp_dt_destroy(link->copied);
cleanup:
    ucp_cleanup(link->context);
free_link:
    free(link);
    return err ? err->code : TOW_ESYS;
}

static void op_free(struct op *op);
static void ep_free(struct net_ep *ep);

/* Ends everything that goes through the worker, and the worker. Afterwards nothing is in flight and
 * every callback has been made. */
static void close_worker(struct net_link *link)
{
    while (!tow_list_empty(&link->bulks))
        net_bulk_refuse(TOW_CONTAINER(link->bulks.next, struct net_bulk, in_link));
    TOW_LIST_EACH (n, &link->eps)
        net_ep_close(TOW_CONTAINER(n, struct net_ep, in_link), NULL, NULL);
    uint64_t until = tow_now_ms() + FREE_MS;
    while ((!tow_list_empty(&link->eps) || !tow_list_empty(&link->ops)) && tow_now_ms() < until)
        if (!net_link_progress(link)) sched_yield();
    while (!tow_list_empty(&link->bulks)) /* those that came meanwhile */
        net_bulk_refuse(TOW_CONTAINER(link->bulks.next, struct net_bulk, in_link));
    TOW_LIST_EACH (n, &link->eps) {
        struct net_ep *ep = TOW_CONTAINER(n, struct net_ep, in_link);
        TOW_LIST_EACH_SAFE (r, &ep->rkeys) net_rkey_free(TOW_CONTAINER(r, struct net_rkey, in_ep));
    }
    ucp_worker_destroy(link->worker);
    /* The worker may have made callbacks and moved bytes to its last moment: only now may the
     * memory go that they name, and only now do the owners hear of an end that UCX owed. */
    TOW_LIST_EACH_SAFE (n, &link->notes) {
        struct note *note = TOW_CONTAINER(n, struct note, node);
        tow_list_remove(n);
        if (note->kind == NOTE_MESSAGE) free(TOW_CONTAINER(note, struct message, note));
    }
    while (!tow_list_empty(&link->ops)) {
        struct op *op = TOW_CONTAINER(link->ops.next, struct op, in_link);
        net_done_fn fn = op->fn;
        void *arg = op->arg;
        tow_list_remove(&op->in_link);
        link->stats.ops--;
        op_free(op);
        if (fn) fn(arg, TOW_ECANCEL);
    }
    while (!tow_list_empty(&link->eps))
        ep_free(TOW_CONTAINER(link->eps.next, struct net_ep, in_link));
}

int net_link_reopen(struct net_link *link, struct tow_err *err)
{
    ucp_worker_h old = link->worker;
    uint8_t *old_address = link->address;
    int rc = open_worker(link, err);
    if (rc < 0) return rc;
    ucp_worker_h fresh = link->worker;
    link->worker = old;
    close_worker(link);
    link->worker = fresh;
    free(old_address);
    link->empty_in_row = 0;
    link->woken = link->jammed = false;
    return 0;
}

void net_link_free(struct net_link *link)
{
    if (!link) return;
    close_worker(link);
    TOW_LIST_EACH_SAFE (n, &link->free_ops) free(TOW_CONTAINER(n, struct op, in_link));
    TOW_LIST_EACH_SAFE (n, &link->regions)
        net_region_free(link, TOW_CONTAINER(n, struct net_region, in_link));
    ucp_dt_destroy(link->copied);
    ucp_cleanup(link->context);
    free(link->address);
    free(link);
}

const void *net_link_address(const struct net_link *link, size_t *bytes)
{
    *bytes = link->address_bytes;
    return link->address;
}

void net_link_stats(const struct net_link *link, struct net_link_stats *out)
{
    *out = link->stats;
}

/* --- operations ------------------------------------------------------------------------------- */

static struct op *op_new(struct net_link *link, enum op_kind kind, struct net_ep *ep,
                         net_done_fn fn, void *arg, size_t bytes)
{
    struct op *op;
    if (!tow_list_empty(&link->free_ops)) {
        op = TOW_CONTAINER(link->free_ops.next, struct op, in_link);
        tow_list_remove(&op->in_link);
        link->n_free_ops--;
    } else {
        op = malloc(sizeof *op);
        if (!op) return NULL;
    }
    *op = (struct op){.kind = kind, .link = link, .ep = ep, .fn = fn, .arg = arg, .bytes = bytes};
    note_init(&op->note, NOTE_OP);
    tow_list_append(&link->ops, &op->in_link);
    if (link->stats.ops++ == 0) link->progress_us = tow_now_us();
    if (ep) ep->n_ops++;
    return op;
}

static void op_free(struct op *op)
{
    struct net_link *link = op->link;
    free(op->copy);
    op->copy = NULL;
    if (link->n_free_ops < OPS_KEPT) {
        link->n_free_ops++;
        tow_list_append(&link->free_ops, &op->in_link);
    } else {
        free(op);
    }
}

static void op_ended(struct op *op, ucs_status_t status)
{
    op->code = code_of(status);
    post(op->link, &op->note);
}

/* UCX's callback for a request that did not end at once. */
static void on_request(void *request, ucs_status_t status, void *user)
{
    op_ended(user, status);
    ucp_request_free(request);
}

static void on_am_received(void *request, ucs_status_t status, size_t length, void *user)
{
    struct op *op = user;
    /* A sender that ships another length than it announced has broken the rules. */
    op_ended(op, status == UCS_OK && length != op->bytes ? UCS_ERR_MESSAGE_TRUNCATED : status);
    ucp_request_free(request);
}

/* NULL: ended already; an error: never began; else on_request will come. */
static void op_started(struct op *op, ucs_status_ptr_t ptr)
{
    if (ptr == NULL)
        op_ended(op, UCS_OK);
    else if (UCS_PTR_IS_ERR(ptr))
        op_ended(op, UCS_PTR_STATUS(ptr));
}

int net_ep_send(struct net_ep *ep, const void *frame, uint32_t bytes)
{
    tow_assert(bytes <= NET_LINK_MESSAGE_MAX);
    if (ep->closing) return TOW_EPEER;
    struct op *op = op_new(ep->link, OP_SEND, ep, NULL, NULL, bytes);
    if (!op) return TOW_ENOMEM;
    op->copy = malloc(bytes ? bytes : 1);
    if (!op->copy) {
        op_ended(op, UCS_ERR_NO_MEMORY);
        return TOW_ENOMEM;
    }
    memcpy(op->copy, frame, bytes);
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                             UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
                             .flags = UCP_AM_SEND_FLAG_EAGER,
                             .cb.send = on_request,
                             .user_data = op};
    op_started(op, ucp_am_send_nbx(ep->ucp, AM_MESSAGE, NULL, 0, op->copy, bytes, &p));
    return 0;
}

/* Says to UCX in which of our regions the bytes of an operation lie; see "Named" above. */
static void name_region(const struct net_link *link, ucp_request_param_t *p, const void *data,
                        size_t bytes)
{
#if UCP_API_VERSION >= UCP_VERSION(1, 13)
    TOW_LIST_EACH (n, &link->regions) {
        const struct net_region *r = TOW_CONTAINER(n, struct net_region, in_link);
        const size_t at = (size_t)((uintptr_t)data - (uintptr_t)r->base);
        if (at > r->bytes || bytes > r->bytes - at) continue;
        p->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        p->memh = r->memh;
        return;
    }
#else
    (void)link, (void)p, (void)data, (void)bytes;
#endif
}

int net_ep_get(struct net_ep *ep, struct net_rkey *k, uint64_t remote, void *local, size_t bytes,
               net_done_fn on_done, void *arg)
{
    if (ep->closing) return TOW_EPEER;
    struct op *op = op_new(ep->link, OP_GET, ep, on_done, arg, bytes);
    if (!op) return TOW_ENOMEM;
    ucp_request_param_t p = {.op_attr_mask =
                                 UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                             .cb.send = on_request,
                             .user_data = op};
    name_region(ep->link, &p, local, bytes);
    op_started(op, ucp_get_nbx(ep->ucp, local, bytes, remote, k->ucp, &p));
    return 0;
}

int net_ep_send_bulk(struct net_ep *ep, const void *head, uint32_t head_bytes, const void *data,
                     size_t bytes, net_done_fn on_done, void *arg)
{
    tow_assert(head_bytes <= NET_LINK_MESSAGE_MAX);
    if (ep->closing) return TOW_EPEER;
    struct op *op = op_new(ep->link, OP_BULK_OUT, ep, on_done, arg, bytes);
    if (!op) return TOW_ENOMEM;
    op->copy = malloc(head_bytes ? head_bytes : 1);
    if (!op->copy) {
        op_ended(op, UCS_ERR_NO_MEMORY);
        return 0;
    }
    memcpy(op->copy, head, head_bytes);
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                             UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
                             .flags = UCP_AM_SEND_FLAG_RNDV,
                             .cb.send = on_request,
                             .user_data = op};
    name_region(ep->link, &p, data, bytes);
    op_started(op, ucp_am_send_nbx(ep->ucp, AM_BULK, op->copy, head_bytes, data, bytes, &p));
    return 0;
}

/* --- receiving -------------------------------------------------------------------------------- */

/* Stands in for the stuck queue described above: from the place's pass on nothing comes in. */
static bool is_jammed(struct net_link *link)
{
    if (!link->jammed && tow_fault("link.jam")) link->jammed = true;
    return link->jammed;
}

static ucs_status_t on_am_message(void *arg, const void *header, size_t header_bytes, void *data,
                                  size_t bytes, const ucp_am_recv_param_t *param)
{
    struct net_link *link = arg;
    (void)header, (void)header_bytes;
    if (is_jammed(link)) return UCS_OK;
    /* Only small eager messages use this id; whatever else a peer sends here is dropped. */
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) || bytes > NET_LINK_MESSAGE_MAX)
        return UCS_OK;
    struct message *m = malloc(sizeof *m + bytes);
    if (!m) {
        tow_error("ucx: no memory for a message of %zu bytes; dropped", bytes);
        return UCS_OK;
    }
    note_init(&m->note, NOTE_MESSAGE);
    m->bytes = (uint32_t)bytes;
    memcpy(m->frame, data, bytes);
    post(link, &m->note);
    return UCS_OK;
}

static ucs_status_t on_am_bulk(void *arg, const void *header, size_t header_bytes, void *data,
                               size_t bytes, const ucp_am_recv_param_t *param)
{
    struct net_link *link = arg;
    if (is_jammed(link)) return UCS_OK;
    bool waits = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    if (header_bytes > NET_LINK_MESSAGE_MAX || (!waits && bytes > NET_LINK_MESSAGE_MAX))
        return UCS_OK;
    struct net_bulk *b = malloc(sizeof *b + header_bytes);
    if (!b) return UCS_OK;
    *b = (struct net_bulk){.link = link, .bytes = bytes, .head_bytes = (uint32_t)header_bytes};
    note_init(&b->note, NOTE_BULK);
    memcpy(b->head, header, header_bytes);
    if (waits) {
        b->desc = data;
    } else {
        b->eager = malloc(bytes ? bytes : 1);
        if (!b->eager) {
            free(b);
            return UCS_OK;
        }
        memcpy(b->eager, data, bytes);
    }
    tow_list_append(&link->bulks, &b->in_link);
    post(link, &b->note);
    return waits ? UCS_INPROGRESS : UCS_OK; /* in progress: the descriptor stays ours */
}

static void bulk_drop(struct net_bulk *b)
{
    tow_list_remove(&b->in_link);
    tow_list_remove(&b->note.node);
    if (b->desc) ucp_am_data_release(b->link->worker, b->desc);
    free(b->eager);
    free(b);
}

void net_bulk_refuse(struct net_bulk *b)
{
    bulk_drop(b);
}

/* What UCX asks of a datatype. This one only ever comes in; its state is the op. */
static void *start_unpack(void *context, void *buffer, size_t count)
{
    (void)context, (void)count;
    return buffer;
}

static void *start_pack(void *context, const void *buffer, size_t count)
{
    (void)context, (void)buffer, (void)count;
    return NULL;
}

static size_t pack(void *state, size_t offset, void *dst, size_t max)
{
    (void)state, (void)offset, (void)dst, (void)max;
    return 0;
}

static size_t packed_size(void *state)
{
    return ((const struct op *)state)->bytes;
}

/* A piece that comes before its turn, as it may over several connections, goes straight to its
 * place. Then into->at stays short of the end, and the digest is made of all that is there. */
static ucs_status_t unpack(void *state, size_t offset, const void *src, size_t n)
{
    struct tow_hash_copy *into = ((const struct op *)state)->into;
    if (offset > into->n || n > into->n - offset) return UCS_ERR_MESSAGE_TRUNCATED;
    if (offset == into->at)
        tow_hash_copy_add(into, src, n);
    else
        memcpy(into->dst + offset, src, n);
    return UCS_OK;
}

static void finish(void *state)
{
    (void)state;
}

static int make_datatype(struct net_link *link, struct tow_err *err)
{
    const ucp_generic_dt_ops_t ops = {start_pack, start_unpack, packed_size, pack, unpack, finish};
    ucs_status_t s = ucp_dt_create_generic(&ops, NULL, &link->copied);
    return s == UCS_OK ? 0
                       : tow_fail(err, TOW_ENOMEM, "ucx: no datatype: %s", ucs_status_string(s));
}

static int bulk_take(struct net_bulk *b, void *local, struct tow_hash_copy *into,
                     net_done_fn on_done, void *arg)
{
    struct net_link *link = b->link;
    struct op *op = op_new(link, OP_BULK_IN, NULL, on_done, arg, b->bytes);
    if (!op) {
        bulk_drop(b);
        return TOW_ENOMEM;
    }
    op->into = into;
    if (b->eager) {
        if (into)
            tow_hash_copy_add(into, b->eager, b->bytes);
        else
            memcpy(local, b->eager, b->bytes);
        op_ended(op, UCS_OK);
    } else {
        ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                 UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_DATATYPE,
                                 .cb.recv_am = on_am_received,
                                 .datatype = into ? link->copied : ucp_dt_make_contig(1),
                                 .user_data = op};
        if (!into) name_region(link, &p, local, b->bytes);
        op_started(op, ucp_am_recv_data_nbx(link->worker, b->desc, into ? (void *)op : local,
                                            b->bytes, &p));
        b->desc = NULL;
    }
    bulk_drop(b);
    return 0;
}

int net_bulk_take(struct net_bulk *b, void *local, net_done_fn on_done, void *arg)
{
    return bulk_take(b, local, NULL, on_done, arg);
}

int net_bulk_copy(struct net_bulk *b, struct tow_hash_copy *into, net_done_fn on_done, void *arg)
{
    tow_assert(into->n == b->bytes);
    return bulk_take(b, into->dst, into, on_done, arg);
}

/* --- endpoints -------------------------------------------------------------------------------- */

static void on_ucp_error(void *arg, ucp_ep_h ucp, ucs_status_t status)
{
    struct net_ep *ep = arg;
    (void)ucp;
    if (ep->closing || ep->error_code) return;
    ep->error_code = code_of(status);
    if (ep->error_code == 0 || ep->error_code == TOW_ECANCEL) ep->error_code = TOW_EPEER;
    ep->error_status = status;
    ep->link->stats.ep_errors++;
    post(ep->link, &ep->error);
}

int net_ep_open(struct net_link *link, const void *address, size_t bytes, void *user,
                struct net_ep **out, struct tow_err *err)
{
    const uint8_t *way = pick_address(link, address, bytes);
    if (!way) return tow_fail(err, TOW_EINVAL, "data address: %zu bytes that make none", bytes);
    struct net_ep *ep = calloc(1, sizeof *ep);
    if (!ep) return tow_fail(err, TOW_ENOMEM, "no memory for an endpoint");
    ep->link = link;
    ep->user = user;
    note_init(&ep->error, NOTE_EP_ERROR);
    note_init(&ep->closed, NOTE_EP_CLOSED);
    tow_list_init(&ep->rkeys);
    ucp_ep_params_t p = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                       UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                       UCP_EP_PARAM_FIELD_ERR_HANDLER,
                         .address = (const ucp_address_t *)way,
                         .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                         .err_handler = {.cb = on_ucp_error, .arg = ep}};
    ucs_status_t s = ucp_ep_create(link->worker, &p, &ep->ucp);
    if (s != UCS_OK) {
        free(ep);
        return tow_fail(err, TOW_EPEER, "ucx: no way to the peer's address: %s",
                        ucs_status_string(s));
    }
    tow_list_append(&link->eps, &ep->in_link);
    link->stats.eps++;
    *out = ep;
    return 0;
}

void *net_ep_user(const struct net_ep *ep)
{
    return ep->user;
}

static void on_ucp_closed(void *request, ucs_status_t status, void *user)
{
    struct net_ep *ep = user;
    (void)status;
    ep->ucp_closed = true;
    if (ep->n_ops == 0) post(ep->link, &ep->closed);
    ucp_request_free(request);
}

void net_ep_close(struct net_ep *ep, net_done_fn on_closed, void *arg)
{
    if (ep->closing) return;
    ep->closing = true;
    ep->on_closed = on_closed;
    ep->closed_arg = arg;
    tow_list_remove(&ep->error.node); /* an error nobody was told of needs no telling now */
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                             UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
                             .flags = UCP_EP_CLOSE_FLAG_FORCE,
                             .cb.send = on_ucp_closed,
                             .user_data = ep};
    ucs_status_ptr_t ptr = ucp_ep_close_nbx(ep->ucp, &p);
    if (ptr == NULL || UCS_PTR_IS_ERR(ptr)) {
        ep->ucp_closed = true;
        if (ep->n_ops == 0) post(ep->link, &ep->closed);
    }
}

static void ep_free(struct net_ep *ep)
{
    net_done_fn fn = ep->on_closed;
    void *arg = ep->closed_arg;
    TOW_LIST_EACH_SAFE (n, &ep->rkeys) net_rkey_free(TOW_CONTAINER(n, struct net_rkey, in_ep));
    tow_list_remove(&ep->in_link);
    ep->link->stats.eps--;
    free(ep);
    if (fn) fn(arg, 0);
}

/* UCX tells the lanes of an endpoint only as text, in all versions; the lane that carries reads is
 * marked rma_bw (or rma), the one for bulk messages am_bw (or am). A lane's line looks like
 *   #   lane[1]:  0:posix/memory.0 md[0]   -> md[0]/posix/sysdev[255] rma_bw#0 am am_bw#0 */
static bool lane_transport(const char *text, const char *mark, char *out, size_t cap)
{
    for (const char *line = text; line && *line;
         line = strchr(line, '\n'), line = line ? line + 1 : 0) {
        const char *end = strchr(line, '\n');
        size_t n = end ? (size_t)(end - line) : strlen(line);
        const char *lane = memmem(line, n, "lane[", 5);
        const char *hit = lane ? memmem(lane, n - (size_t)(lane - line), mark, strlen(mark)) : NULL;
        if (!hit) continue;
        const char *colon = memmem(lane, n - (size_t)(lane - line), "]:", 2);
        colon = colon ? strchr(colon + 2, ':') : NULL;
        if (!colon || colon > hit) continue;
        size_t len = strcspn(colon + 1, "/ \n");
        if (len == 0) continue;
        snprintf(out, cap, "%.*s", (int)len, colon + 1);
        return true;
    }
    return false;
}

void net_ep_transport(const struct net_ep *ep, bool get, char *out, size_t cap)
{
    snprintf(out, cap, "unknown");
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (!f) return;
    ucp_ep_print_info(ep->ucp, f);
    fclose(f);
    if (text && !(get ? lane_transport(text, " rma_bw", out, cap)
                      : lane_transport(text, " am_bw", out, cap)))
        if (!(get && lane_transport(text, " rma", out, cap))) lane_transport(text, " am", out, cap);
    free(text);
}

/* --- memory ----------------------------------------------------------------------------------- */

int net_region_new(struct net_link *link, size_t bytes, struct net_region **out,
                   struct tow_err *err)
{
    struct net_region *r = calloc(1, sizeof *r);
    if (!r) return tow_fail(err, TOW_ENOMEM, "no memory for a region");
    ucp_mem_map_params_t p = {.field_mask =
                                  UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
                              .length = bytes,
                              .flags = UCP_MEM_MAP_ALLOCATE};
    struct net_shm shm;
    net_shm_look(&shm);
    if (!net_shm_holds(&shm, bytes)) { /* UCX goes on with private memory */
        char why[400];
        net_shm_explain_pool(&shm, bytes, why, sizeof why);
        tow_warn("%s", why);
    }
    ucs_status_t s = ucp_mem_map(link->context, &p, &r->memh);
    if (s != UCS_OK) {
        tow_fail(err, TOW_ENOMEM, "no %zu bytes of shareable memory: %s", bytes,
                 ucs_status_string(s));
        goto free_region;
    }
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH};
    s = ucp_mem_query(r->memh, &attr);
    if (s == UCS_OK) s = ucp_rkey_pack(link->context, r->memh, &r->key, &r->key_bytes);
    if (s != UCS_OK) {
        tow_fail(err, TOW_ESYS, "ucx: no key for %zu bytes: %s", bytes, ucs_status_string(s));
        goto unmap;
    }
    r->base = attr.address;
    r->bytes = bytes;
    tow_list_append(&link->regions, &r->in_link);
    *out = r;
    return 0;

unmap:
    ucp_mem_unmap(link->context, r->memh);
free_region:
    free(r);
    return err ? err->code : TOW_ENOMEM;
}

void net_region_free(struct net_link *link, struct net_region *r)
{
    if (!r) return;
    tow_list_remove(&r->in_link);
    ucp_rkey_buffer_release(r->key);
    ucp_mem_unmap(link->context, r->memh);
    free(r);
}

void *net_region_base(const struct net_region *r)
{
    return r->base;
}
size_t net_region_bytes(const struct net_region *r)
{
    return r->bytes;
}
const void *net_region_key(const struct net_region *r, size_t *bytes)
{
    *bytes = r->key_bytes;
    return r->key;
}

int net_rkey_open(struct net_ep *ep, const void *key, size_t key_bytes, struct net_rkey **out,
                  struct tow_err *err)
{
    if (key_bytes == 0) return tow_fail(err, TOW_EINVAL, "remote key: empty");
    struct net_rkey *k = calloc(1, sizeof *k);
    if (!k) return tow_fail(err, TOW_ENOMEM, "no memory for a remote key");
    ucs_status_t s = ucp_ep_rkey_unpack(ep->ucp, key, &k->ucp);
    if (s != UCS_OK) {
        free(k);
        return tow_fail(err, TOW_EWIRE, "ucx: remote key refused: %s", ucs_status_string(s));
    }
    tow_list_append(&ep->rkeys, &k->in_ep);
    *out = k;
    return 0;
}

void net_rkey_free(struct net_rkey *k)
{
    if (!k) return;
    tow_list_remove(&k->in_ep);
    ucp_rkey_destroy(k->ucp);
    free(k);
}

const void *net_rkey_peek(struct net_rkey *k, uint64_t remote)
{
    void *here = NULL;
    if (tow_fault("link.map")) return NULL;
    return ucp_rkey_ptr(k->ucp, remote, &here) == UCS_OK ? here : NULL;
}

/* --- running ---------------------------------------------------------------------------------- */

static void tell_op(struct net_link *link, struct op *op)
{
    struct net_ep *ep = op->ep;
    net_done_fn fn = op->fn;
    void *arg = op->arg;
    int code = op->code;
    if (code == 0) {
        if (op->kind == OP_GET) link->stats.get_bytes += op->bytes;
        if (op->kind == OP_BULK_IN) link->stats.bulk_in_bytes += op->bytes;
        if (op->kind == OP_BULK_OUT) link->stats.bulk_out_bytes += op->bytes;
    }
    tow_list_remove(&op->in_link);
    link->stats.ops--;
    op_free(op);
    if (fn) fn(arg, code);
    /* Last: the callback may have closed the endpoint. */
    if (ep && --ep->n_ops == 0 && ep->closing && ep->ucp_closed) post(link, &ep->closed);
}

static void tell(struct net_link *link, struct note *n)
{
    const struct net_link_hooks *h = &link->hooks;
    switch (n->kind) {
    case NOTE_OP: tell_op(link, TOW_CONTAINER(n, struct op, note)); return;
    case NOTE_MESSAGE: {
        struct message *m = TOW_CONTAINER(n, struct message, note);
        if (h->on_message) h->on_message(h->arg, m->frame, m->bytes);
        free(m);
        return;
    }
    case NOTE_BULK: {
        struct net_bulk *b = TOW_CONTAINER(n, struct net_bulk, note);
        if (h->on_bulk)
            h->on_bulk(h->arg, b, b->head, b->head_bytes, b->bytes);
        else
            net_bulk_refuse(b);
        return;
    }
    case NOTE_EP_ERROR: {
        struct net_ep *ep = TOW_CONTAINER(n, struct net_ep, error);
        if (h->on_ep_error)
            h->on_ep_error(h->arg, ep, ep->error_code, ucs_status_string(ep->error_status));
        return;
    }
    case NOTE_EP_CLOSED: ep_free(TOW_CONTAINER(n, struct net_ep, closed)); return;
    }
}

unsigned net_link_progress(struct net_link *link)
{
    unsigned n = 0;
    while (n < PROGRESS_MAX && ucp_worker_progress(link->worker)) n++;
    if (link->woken) {
        link->woken = false;
        if (n == 0) {
            link->stats.empty_wakes++;
            link->empty_in_row++;
        } else {
            link->empty_in_row = 0;
        }
    }
    /* Notes that come up while telling wait for the next round, so that nobody starves. */
    struct tow_list round;
    tow_list_init(&round);
    if (!tow_list_empty(&link->notes)) {
        round = link->notes;
        round.next->prev = &round;
        round.prev->next = &round;
        tow_list_init(&link->notes);
    }
    while (!tow_list_empty(&round)) {
        struct note *note = TOW_CONTAINER(round.next, struct note, node);
        tow_list_remove(&note->node);
        tell(link, note);
        n++;
    }
    if (n) link->progress_us = tow_now_us();
    return n;
}

bool net_link_wait(struct net_link *link, int wake_fd, int timeout_ms)
{
    if (!tow_list_empty(&link->notes)) return false;
    bool busy = link->stats.ops > 0;
    if (busy && tow_now_us() - link->progress_us < SPIN_US) {
        sched_yield();
        return false;
    }
    if (ucp_worker_arm(link->worker) != UCS_OK) return false; /* busy: events are waiting */
    bool deaf = link->empty_in_row >= EMPTY_MAX;
    struct pollfd fds[2] = {{.fd = wake_fd, .events = POLLIN},
                            {.fd = deaf ? -1 : link->event_fd, .events = POLLIN}};
    if ((busy || deaf) && (timeout_ms < 0 || timeout_ms > 1)) timeout_ms = 1;
    link->stats.waits++;
    int rc = poll(fds, 2, timeout_ms);
    if (deaf) link->empty_in_row = 0;
    if (rc > 0 && (fds[1].revents & POLLIN)) link->woken = true;
    return rc > 0 && (fds[0].revents & POLLIN);
}
