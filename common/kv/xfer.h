/* kv/xfer.h - the two machines that ship one sequence's pages and tail: sender and receiver.
 *
 * Why      Pages may be reused only when nothing can still read or write them, whatever is
 *          cancelled, late, doubled, forged or dead. That is decided here and nowhere else.
 * Owner    Whoever embeds them (kv/mover). Pure: event in, actions out; no I/O, no clock.
 * Unit     A part is one page, or the tail. The receiver reads each part itself and checks its
 *          digest; the sender never writes into the receiver.
 *
 * Sender   OPEN --tail offered, all acked--------------------------------------> ENDED (0)
 *            +-- cancel, peer cancel, nack, peer lost, lease
 *                                     --> CLOSING --no send in flight-----------> ENDED
 *
 * Receiver WAITING --first offer--> MOVING --all parts verified----------------> ENDED (0)
 *            +------ cancel, peer cancel, bad digest, failed read, peer lost, lease
 *                                     --> CLOSING --no read in flight-----------> ENDED
 *
 * state     true in it                                      deadline
 * OPEN      offers may be added; pages held                 lease since the last ack (or offer or
 *                                                           touch while nothing is unacked)
 * WAITING   pages reserved, nothing known of the sender     lease since expect or touch
 * MOVING    reads in flight or expected                     lease since the last offer, read, touch
 * CLOSING   no new read or send; the code is decided        none: the link bounds its operations
 * ENDED     nothing in flight; pages belong to the caller   -
 */
#ifndef TOW_KV_XFER_H
#define TOW_KV_XFER_H

#include <stdbool.h>
#include <stdint.h>

#define KV_PART_TAIL      0xffffffffu /* index of the tail */
#define KV_XFER_MAX_PAGES 65536u      /* of one sequence: 16 M tokens at 256 a page */

struct tow_err;

/* One attempt of one request; both numbers random and new for every attempt. */
struct kv_ticket {
    uint64_t id, nonce;
};

enum kv_xfer_state {
    KV_XFER_OPEN,
    KV_XFER_WAITING,
    KV_XFER_MOVING,
    KV_XFER_CLOSING,
    KV_XFER_ENDED
};

enum kv_part_state {
    KV_PART_NONE,    /* not offered yet */
    KV_PART_OFFERED, /* sender: told the peer; receiver: to be read */
    KV_PART_BUSY,    /* receiver: its read is in flight */
    KV_PART_DONE     /* acked; verified */
};

enum kv_xfer_event_kind {
    /* both */
    KV_XFER_CANCEL,      /* by our own side; code says why */
    KV_XFER_PEER_CANCEL, /* the peer gave up; code */
    KV_XFER_PEER_LOST,   /* the connection is gone; operations in flight will still report */
    KV_XFER_TOUCH,       /* sender: our job is alive; receiver: the peer says so */
    KV_XFER_TICK,        /* time passed */
    /* sender */
    KV_XFER_OFFER,  /* part `index` is ready to go */
    KV_XFER_SENT,   /* its bulk message left, or failed with code */
    KV_XFER_ACKED,  /* the peer has verified part `index` */
    KV_XFER_NACKED, /* the peer refuses; code */
    /* receiver */
    KV_XFER_OFFERED, /* the peer has part `index` for us, of n_pages in all */
    KV_XFER_READ     /* the read ended and its digest was checked; code */
};

struct kv_xfer_event {
    enum kv_xfer_event_kind kind;
    uint64_t now_ms;
    uint32_t index;
    uint32_t n_pages;
    int code; /* 0 or TOW_E* */
};

/* Performed in this order. */
enum kv_xfer_action {
    KV_DO_OFFER = 1,       /* tell the peer about part `index`; pushing: its bytes go along, and
                             KV_XFER_SENT must follow */
    KV_DO_ACK = 2,         /* to the peer: part `index` is verified */
    KV_DO_NACK = 4,        /* to the peer: part `index` is refused, `code` */
    KV_DO_CANCEL = 8,      /* to the peer: given up, `code` */
    KV_DO_TOUCH = 16,      /* to the peer: still alive */
    KV_DO_READ_MORE = 32,  /* kv_xfer_next() has something */
    KV_DO_TELL_PART = 64,  /* to the owner: part `index` is acked (sender) or verified (receiver) */
    KV_DO_TELL_ENDED = 128 /* to the owner, last and once: ended with `code`, pages are free */
};

struct kv_xfer_actions {
    uint32_t set; /* KV_DO_* */
    uint32_t index;
    int code;
};

struct kv_xfer {
    enum kv_xfer_state state;
    bool sender;
    bool pushing;     /* sender: parts go out as bulk messages, which read our pages */
    bool peer_gone;   /* no use in telling it anything */
    bool lease_ended; /* the lease decided the outcome */
    int code;         /* decided outcome, from CLOSING on */
    uint32_t n_pages; /* besides the tail */
    uint32_t n_offered, n_busy, n_done;
    uint32_t next; /* receiver: the search for something to read starts here */
    uint64_t lease_ms, progress_ms;
    uint8_t *parts; /* borrowed: enum kv_part_state [n_pages + 1], the tail last */
};

/* parts: n_pages + 1 bytes that live as long as x; n_pages <= KV_XFER_MAX_PAGES. */
void kv_xfer_init_sender(struct kv_xfer *x, uint32_t n_pages, uint8_t *parts, bool pushing,
                         uint64_t lease_ms, uint64_t now_ms);
void kv_xfer_init_receiver(struct kv_xfer *x, uint32_t n_pages, uint8_t *parts, uint64_t lease_ms,
                           uint64_t now_ms);
/* Total: any event in any state. What does not fit is refused in the actions or ignored. */
void kv_xfer_step(struct kv_xfer *x, const struct kv_xfer_event *ev, struct kv_xfer_actions *out);
/* Receiver: the next part to read, now BUSY: KV_XFER_READ must follow. False: none now. */
bool kv_xfer_next(struct kv_xfer *x, uint32_t *index);
/* When KV_XFER_TICK would end it; UINT64_MAX: never. */
uint64_t kv_xfer_deadline_ms(const struct kv_xfer *x);
const char *kv_xfer_state_name(enum kv_xfer_state s); /* static */

#endif
