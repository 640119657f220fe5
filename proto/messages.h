/* proto/messages.h - every message there is: one table row each, one field list each.
 *
 * Why      Number, version, cap, direction and fields stand in one place; enum, structs, pack,
 *          unpack, names and docs/protocol.md follow from it and cannot disagree.
 * Rules    Fields are added at the end of a list, numbers are never used again. A receiver ignores
 *          bytes behind the fields it knows and answers a type it does not know with UNKNOWN.
 * Total    wire_unpack() takes any bytes and gives a value or TOW_EWIRE. What it gives has every
 *          number within the cap of its row, text without control characters, spans inside the body
 *          and whole items inside the spans. pack(unpack(x)) is x without trailing bytes.
 * Rows     F(kind, name, max, note). Kinds: u8 u16 u32 u64 (at most max), i16 (an error code, 0 or
 *          TOW_E*; max unused), f32 (finite; max unused), text, bytes (at most max bytes), ids,
 *          u64s (at most max items), ticket (id u64, nonce u64), sampling (the list WIRE_SAMPLING),
 *          part (the list WIRE_PART).
 */
#ifndef TOW_PROTO_MESSAGES_H
#define TOW_PROTO_MESSAGES_H

#include "proto/capture.h"
#include "proto/page.h"
#include "proto/wire.h"

#define WIRE_PROTOCOL_MIN 1 /* what this build can speak; HELLO carries the range */
#define WIRE_PROTOCOL_MAX 1

#define WIRE_MAX_TOKENS           (1u << 20)
#define WIRE_MAX_NAME             64
#define WIRE_MAX_VALUE            256
#define WIRE_MAX_NOTE             512
#define WIRE_MAX_TAIL_NOTE        2048
#define WIRE_MAX_ADDRESS          4096
#define WIRE_MAX_RKEY             1024
#define WIRE_MAX_FACTS            16384 /* bytes of packed facts */
#define WIRE_MAX_EOS              64
#define WIRE_MAX_BIAS             1024 /* entries */
#define WIRE_MAX_TOP              20   /* top_logprobs */
#define WIRE_MAX_BATCH            4096 /* ids in one TOKENS */
#define WIRE_TOKENS_LOGPROB_BYTES (WIRE_MAX_BATCH * (4u + 8u * WIRE_MAX_TOP))

enum wire_role { WIRE_PREFILL_ROLE = 0, WIRE_DECODE_ROLE = 1 };
enum wire_worker_state { WIRE_STARTING, WIRE_SERVING, WIRE_DRAINING, WIRE_STUCK };
/* What has to agree: wire and layout in the whole pool, the model as well, numerics within a pair,
 * free settings nowhere. Text facts with the router's own model folder, where both sides have the
 * field; to those that know no such class they are free. */
enum wire_fact_class {
    WIRE_FACT_WIRE,
    WIRE_FACT_LAYOUT,
    WIRE_FACT_MODEL,
    WIRE_FACT_NUMERICS,
    WIRE_FACT_FREE,
    WIRE_FACT_TEXT,
    WIRE_FACT_CLASSES
};
enum wire_method { WIRE_METHOD_GET = 0, WIRE_METHOD_AM = 1 };
enum wire_finish_reason { WIRE_FINISH_STOP = 0, WIRE_FINISH_LENGTH = 1 };
enum wire_cancel_reason {
    WIRE_CANCEL_CLIENT = 0,
    WIRE_CANCEL_STOP_STRING = 1,
    WIRE_CANCEL_DEADLINE = 2,
    WIRE_CANCEL_ELSEWHERE = 3
};

/* One attempt of one request; both numbers are new for each attempt. */
struct wire_ticket {
    uint64_t id, nonce;
};

#define WIRE_SAMPLING(F)                                                                           \
    F(f32, temperature, 0, "0 is greedy")                                                          \
    F(f32, top_p, 0, "1 is off")                                                                   \
    F(f32, min_p, 0, "0 is off")                                                                   \
    F(u32, top_k, 0x7fffffff, "0 is off")                                                          \
    F(f32, frequency_penalty, 0, "counts output tokens only")                                      \
    F(f32, presence_penalty, 0, "counts output tokens only")                                       \
    F(f32, repetition_penalty, 0, "1 is off; counts output tokens only")                           \
    F(u64, seed, UINT64_MAX, "key of the random numbers, with the output index")                   \
    F(u8, ignore_eos, 1, "1: end only at max_tokens")                                              \
    F(u8, want_logprobs, 1, "1: TOKENS carries log-probabilities")                                 \
    F(u8, n_top, WIRE_MAX_TOP, "alternatives per position, with want_logprobs")                    \
    F(u32, index_topk, 65536, "sparse selection width; 0: the worker's own")                       \
    F(bytes, logit_bias, WIRE_MAX_BIAS * 8, "entries of token u32, bias f32")

#define WIRE_HELLO(F)                                                                              \
    F(u16, version_min, 65535, "lowest protocol version spoken")                                   \
    F(u16, version_max, 65535, "highest")                                                          \
    F(u64, features, UINT64_MAX, "bits; none defined in version 1")                                \
    F(u8, role, 1, "0 prefill, 1 decode")                                                          \
    F(text, name, WIRE_MAX_NAME, "instance name: letters, digits, '.', '_', '-'")                  \
    F(u64, incarnation, UINT64_MAX, "random, new at each start of the process; never 0")           \
    F(bytes, join_token, 256, "the shared secret; empty when none is set")                         \
    F(u32, pages, UINT32_MAX, "pages in the pool")                                                 \
    F(u32, page_tokens, 65536, "source tokens a page covers")                                      \
    F(u32, max_context, WIRE_MAX_TOKENS, "most prompt + output tokens of one sequence")            \
    F(u32, max_batch, 65536, "decode: sequences per step; prefill: requests at once")              \
    F(u32, chunk_tokens, WIRE_MAX_TOKENS, "prefill: tokens per chunk; decode: 0")                  \
    F(u32, max_pending_tokens, UINT32_MAX, "prefill: prompt tokens it will queue; decode: 0")      \
    F(u32, max_tickets, 65536, "tickets it holds at once")                                         \
    F(u32, reserve_tokens, WIRE_MAX_TOKENS, "decode: outputs it reserves pages for; prefill: 0")   \
    F(bytes, data_address, WIRE_MAX_ADDRESS, "data-plane (UCX) worker address")                    \
    F(text, status_url, WIRE_MAX_VALUE, "ADDR:PORT of its own /health, or empty")                  \
    F(bytes, facts, WIRE_MAX_FACTS, "fingerprint: class u8, field text, value text, repeated")

#define WIRE_WELCOME(F)                                                                            \
    F(u16, version, 65535, "protocol version chosen")                                              \
    F(u64, features, UINT64_MAX, "bits both know")                                                 \
    F(u64, router_incarnation, UINT64_MAX, "random, new at each start of the router")              \
    F(u32, heartbeat_ms, 60000, "send HEARTBEAT this often; 5 missed are death")

#define WIRE_REFUSE(F)                                                                             \
    F(i16, code, 0, "TOW_E*")                                                                      \
    F(text, field, WIRE_MAX_NAME, "which field does not fit")                                      \
    F(text, ours, WIRE_MAX_VALUE, "the refuser's value")                                           \
    F(text, theirs, WIRE_MAX_VALUE, "the value refused")                                           \
    F(text, note, WIRE_MAX_NOTE, "one line for the log")

#define WIRE_HEARTBEAT(F)                                                                          \
    F(u8, state, 255, "0 starting, 1 serving, 2 draining, 3 stuck (engine makes no progress)")     \
    F(u32, queued_requests, UINT32_MAX, "waiting for a first chunk or step")                       \
    F(u32, queued_tokens, UINT32_MAX, "prefill: prompt tokens not computed yet")                   \
    F(u32, running, UINT32_MAX, "tickets with work under way")                                     \
    F(u32, tickets, UINT32_MAX, "all live tickets")                                                \
    F(u32, pages_free, UINT32_MAX, "pages neither held nor reserved")                              \
    F(u32, tokens_per_s, UINT32_MAX, "measured while busy; 0 unknown")                             \
    F(u64, progress, UINT64_MAX, "grows with each chunk or step")

#define WIRE_PING(F) F(u64, seq, UINT64_MAX, "comes back in PONG")
#define WIRE_PONG(F) F(u64, seq, UINT64_MAX, "of the PING")
#define WIRE_DRAIN(F)                                                                              \
    F(u32, limit_ms, UINT32_MAX, "end what still runs after this; 0: the worker's own limit")
#define WIRE_BYE(F)     F(text, note, WIRE_MAX_NOTE, "why it leaves")
#define WIRE_UNKNOWN(F) F(u16, type, 65535, "the type that was not understood")

#define WIRE_PAIR(F)                                                                               \
    F(text, name, WIRE_MAX_NAME, "decode worker to prove a link to")                               \
    F(u64, incarnation, UINT64_MAX, "of that worker")                                              \
    F(bytes, data_address, WIRE_MAX_ADDRESS, "its data-plane address")
#define WIRE_PAIRED(F)                                                                             \
    F(text, name, WIRE_MAX_NAME, "decode worker")                                                  \
    F(u64, incarnation, UINT64_MAX, "of that worker")                                              \
    F(u8, ok, 1, "1: a page went over the link and its digest was right")                          \
    F(text, transport, WIRE_MAX_NAME, "what the bytes ride on, as the transport names it")         \
    F(u8, method, 1, "0 get, 1 active message: the faster one")                                    \
    F(u32, mb_per_s, UINT32_MAX, "measured with pages")                                            \
    F(u32, latency_us, UINT32_MAX, "of a small message, both ways")                                \
    F(text, note, WIRE_MAX_NOTE, "when not ok: which field, both values")
#define WIRE_UNPAIR(F)                                                                             \
    F(text, name, WIRE_MAX_NAME, "peer that died or left")                                         \
    F(u64, incarnation, UINT64_MAX, "of that peer")
#define WIRE_RELINK(F) F(text, note, WIRE_MAX_NOTE, "why, for the log")
#define WIRE_UNFIT(F)                                                                              \
    F(text, name, WIRE_MAX_NAME, "the other one")                                                  \
    F(text, note, WIRE_MAX_NOTE, "which field; prefill's value, then decode's")
#define WIRE_UNANSWERED(F)                                                                         \
    F(text, name, WIRE_MAX_NAME, "decode worker that did not answer the greeting")                 \
    F(u64, incarnation, UINT64_MAX, "of that worker")

#define WIRE_RESERVE(F)                                                                            \
    F(ticket, ticket, 0, "new for this attempt")                                                   \
    F(text, prefill_name, WIRE_MAX_NAME, "who will send the pages")                                \
    F(u64, prefill_incarnation, UINT64_MAX, "of that worker; pages of another are refused")        \
    F(u32, n_tokens, WIRE_MAX_TOKENS, "tokens the pages will cover: prompt + outputs so far")      \
    F(u32, max_tokens, WIRE_MAX_TOKENS, "most output tokens of the request, those so far counted") \
    F(u32, lease_ms, 600000, "without progress for so long the ticket is dead")                    \
    F(sampling, sampling, 0, "how to choose tokens")                                               \
    F(ids, eos, WIRE_MAX_EOS, "ids that end the answer")                                           \
    F(ids, outputs, WIRE_MAX_TOKENS, "outputs so far (of an earlier attempt), in order")           \
    F(bytes, capture, WIRE_MAX_CAPTURE, "what to rank, see proto/capture.h; empty: nothing")
#define WIRE_GRANT(F)                                                                              \
    F(ticket, ticket, 0, "of the RESERVE")                                                         \
    F(u32, pages, UINT32_MAX, "pages held for it")
#define WIRE_DENY(F)                                                                               \
    F(ticket, ticket, 0, "of the RESERVE or PREFILL")                                              \
    F(i16, code, 0, "EFULL, EBUSY, EDRAIN: try elsewhere or later; others: do not")                \
    F(u32, retry_after_ms, UINT32_MAX, "when room is expected; 0 unknown")                         \
    F(text, note, WIRE_MAX_NOTE, "field, value and right range")
#define WIRE_PREFILL(F)                                                                            \
    F(ticket, ticket, 0, "granted by the decode worker")                                           \
    F(text, decode_name, WIRE_MAX_NAME, "where the pages go")                                      \
    F(u64, decode_incarnation, UINT64_MAX, "of that worker")                                       \
    F(bytes, decode_address, WIRE_MAX_ADDRESS, "its data-plane address")                           \
    F(u32, n_prompt, WIRE_MAX_TOKENS, "the first n_prompt tokens are prompt, the rest outputs")    \
    F(u32, max_tokens, WIRE_MAX_TOKENS, "as in RESERVE")                                           \
    F(u32, lease_ms, 600000, "as in RESERVE")                                                      \
    F(sampling, sampling, 0, "for the first token")                                                \
    F(ids, eos, WIRE_MAX_EOS, "as in RESERVE")                                                     \
    F(ids, tokens, WIRE_MAX_TOKENS, "prompt, then outputs so far")                                 \
    F(bytes, capture, WIRE_MAX_CAPTURE, "as in RESERVE")
#define WIRE_PROGRESS(F)                                                                           \
    F(ticket, ticket, 0, "")                                                                       \
    F(u32, tokens_done, WIRE_MAX_TOKENS, "computed so far")
#define WIRE_PREFILL_DONE(F)                                                                       \
    F(ticket, ticket, 0, "all pages acknowledged; the prefill side has forgotten it")              \
    F(u32, n_tokens, WIRE_MAX_TOKENS, "tokens covered")                                            \
    F(u32, n_cached, WIRE_MAX_TOKENS, "of these, taken from kept pages")
#define WIRE_FAILED(F)                                                                             \
    F(ticket, ticket, 0, "this side has forgotten it")                                             \
    F(i16, code, 0, "TOW_E*; its scope says whether another try makes sense")                      \
    F(text, note, WIRE_MAX_NOTE, "one line")
#define WIRE_TOKENS(F)                                                                             \
    F(ticket, ticket, 0, "")                                                                       \
    F(u32, first, WIRE_MAX_TOKENS, "output index of ids[0], counted over all attempts")            \
    F(ids, ids, WIRE_MAX_BATCH, "")                                                                \
    F(u8, has_logprobs, 1, "")                                                                     \
    F(u8, n_top, WIRE_MAX_TOP, "")                                                                 \
    F(bytes, logprobs, WIRE_TOKENS_LOGPROB_BYTES,                                                  \
      "per id: f32 of the chosen one, then n_top of token u32, f32")
#define WIRE_FINISH(F)                                                                             \
    F(ticket, ticket, 0, "this side has forgotten it")                                             \
    F(u8, reason, 1, "0 stop (an eos id, not in TOKENS), 1 length")                                \
    F(u32, n_output, WIRE_MAX_TOKENS, "output tokens sent, over all attempts")                     \
    F(u32, stop_id, UINT32_MAX, "the eos id that ended it; 0 with length")
#define WIRE_CANCEL(F)                                                                             \
    F(ticket, ticket, 0, "unknown tickets are answered with CANCELLED too")                        \
    F(u8, reason, 255, "0 client, 1 stop string, 2 deadline, 3 goes on elsewhere")
#define WIRE_CAPTURED(F)                                                                           \
    F(ticket, ticket, 0, "")                                                                       \
    F(u32, step, WIRE_MAX_TOKENS, "the row that chose this output, counted over all attempts")     \
    F(u32, layer, 65535, "of the model")                                                           \
    F(bytes, row, WIRE_MAX_CAPTURED, "where the entries rank, see proto/capture.h")
#define WIRE_CANCELLED(F) F(ticket, ticket, 0, "this side has forgotten it; nothing more comes")

#define WIRE_XHELLO(F)                                                                             \
    F(u16, version, 65535, "protocol version")                                                     \
    F(u64, features, UINT64_MAX, "bits")                                                           \
    F(text, name, WIRE_MAX_NAME, "prefill worker")                                                 \
    F(u64, incarnation, UINT64_MAX, "of it")                                                       \
    F(text, peer_name, WIRE_MAX_NAME, "decode worker this is meant for")                           \
    F(u64, peer_incarnation, UINT64_MAX, "of it; another identity refuses")                        \
    F(bytes, data_address, WIRE_MAX_ADDRESS, "where to answer")                                    \
    F(u64, pool_base, UINT64_MAX, "address of the page pool")                                      \
    F(u64, pool_bytes, UINT64_MAX, "its size")                                                     \
    F(bytes, pool_rkey, WIRE_MAX_RKEY, "key to read it")                                           \
    F(u64, tail_base, UINT64_MAX, "address of the tail area")                                      \
    F(u64, tail_bytes, UINT64_MAX, "its size")                                                     \
    F(bytes, tail_rkey, WIRE_MAX_RKEY, "key to read it")                                           \
    F(bytes, facts, WIRE_MAX_FACTS, "as in HELLO")
#define WIRE_XREADY(F)                                                                             \
    F(text, name, WIRE_MAX_NAME, "decode worker")                                                  \
    F(u64, incarnation, UINT64_MAX, "of it")                                                       \
    F(u64, peer_incarnation, UINT64_MAX, "of the prefill worker that said XHELLO")
#define WIRE_XREFUSE(F) WIRE_REFUSE(F)
#define WIRE_XPROBE(F)                                                                             \
    F(u64, seq, UINT64_MAX, "comes back in XPROBED")                                               \
    F(u8, method, 1, "0 get, 1 active message")                                                    \
    F(u16, times, 1024, "move the part so often and time it")                                      \
    F(part, part, 0, "the page to move")
#define WIRE_XPROBED(F)                                                                            \
    F(u64, seq, UINT64_MAX, "")                                                                    \
    F(u8, method, 1, "")                                                                           \
    F(i16, code, 0, "0, or why the page did not arrive whole")                                     \
    F(u32, mb_per_s, UINT32_MAX, "")                                                               \
    F(text, transport, WIRE_MAX_NAME, "")                                                          \
    F(text, note, WIRE_MAX_NOTE, "")
#define WIRE_OFFER(F)                                                                              \
    F(ticket, ticket, 0, "")                                                                       \
    F(part, part, 0, "what to fetch")                                                              \
    F(u32, n_pages, WIRE_MAX_TOKENS, "pages of the sequence in all, besides the tail")             \
    F(bytes, note, WIRE_MAX_TAIL_NOTE, "tail: position and first output token; page: empty")
#define WIRE_ACK(F)                                                                                \
    F(ticket, ticket, 0, "")                                                                       \
    F(u8, kind, 1, "0 page, 1 tail")                                                               \
    F(u32, index, WIRE_MAX_TOKENS, "of the part that is here and right; the sender may free it")
#define WIRE_NACK(F)                                                                               \
    F(ticket, ticket, 0, "")                                                                       \
    F(u8, kind, 1, "0 page, 1 tail")                                                               \
    F(u32, index, WIRE_MAX_TOKENS, "of the part")                                                  \
    F(i16, code, 0, "the ticket is dead on this side")                                             \
    F(text, note, WIRE_MAX_NOTE, "")
#define WIRE_XCANCEL(F)                                                                            \
    F(ticket, ticket, 0, "dead on the sender's side")                                              \
    F(i16, code, 0, "why")
#define WIRE_XPING(F) WIRE_PING(F)
#define WIRE_XPONG(F) WIRE_PING(F)
#define WIRE_FIRST(F)                                                                              \
    F(u32, position, WIRE_MAX_TOKENS, "tokens the cache covers")                                   \
    F(u32, token, UINT32_MAX, "the first output token of this attempt")                            \
    F(u8, has_logprobs, 1, "")                                                                     \
    F(u8, n_top, WIRE_MAX_TOP, "")                                                                 \
    F(bytes, logprobs, 4 + 8 * WIRE_MAX_TOP, "one row, as in TOKENS")
#define WIRE_XALIVE(F)                                                                             \
    F(ticket, ticket, 0, "its job is alive though nothing is to be offered yet; renews the lease")

/* M(name, NAME, number, first version, body cap, direction, note). Directions: W>R R>W both
 * (control plane); P>D D>P x (data plane, x is both ways), note (body inside another message). The
 * cap is of the whole body, trailing bytes too. */
#define WIRE_MESSAGES(M)                                                                           \
    M(hello, HELLO, 1, 1, 32768, "W>R", "first message of a worker")                               \
    M(welcome, WELCOME, 2, 1, 1024, "R>W", "admitted")                                             \
    M(refuse, REFUSE, 3, 1, 4096, "R>W", "not admitted; the connection closes")                    \
    M(heartbeat, HEARTBEAT, 4, 1, 1024, "W>R", "load and life sign")                               \
    M(ping, PING, 5, 1, 1024, "both", "")                                                          \
    M(pong, PONG, 6, 1, 1024, "both", "")                                                          \
    M(drain, DRAIN, 7, 1, 1024, "R>W", "take no new work, finish the old, then BYE")               \
    M(bye, BYE, 8, 1, 4096, "W>R", "leaving in order")                                             \
    M(unknown, UNKNOWN, 9, 1, 1024, "both", "answer to a type not known")                          \
    M(pair, PAIR, 16, 1, 8192, "R>P", "prove the link to a decode worker")                         \
    M(paired, PAIRED, 17, 1, 4096, "P>R", "outcome of the proof")                                  \
    M(unpair, UNPAIR, 18, 1, 1024, "R>W", "a peer is gone")                                        \
    M(relink, RELINK, 19, 1, 1024, "R>W", "make the data link anew, then join anew")               \
    M(unanswered, UNANSWERED, 20, 1, 1024, "P>R", "follows a PAIRED that is not ok: silence")      \
    M(unfit, UNFIT, 21, 1, 1024, "R>W", "no pair with that one while both live, for the log")      \
    M(reserve, RESERVE, 32, 1, WIRE_MAX_TOKENS * 4 + 65536, "R>D", "hold pages and a slot")        \
    M(grant, GRANT, 33, 1, 1024, "D>R", "held")                                                    \
    M(deny, DENY, 34, 1, 4096, "W>R", "not held; nothing is left of the ticket")                   \
    M(prefill, PREFILL, 35, 1, WIRE_MAX_TOKENS * 4 + 65536, "R>P", "compute and ship")             \
    M(progress, PROGRESS, 36, 1, 1024, "P>R", "a chunk is computed")                               \
    M(prefill_done, PREFILL_DONE, 37, 1, 1024, "P>R", "everything arrived")                        \
    M(failed, FAILED, 38, 1, 4096, "W>R", "the ticket died here")                                  \
    M(tokens, TOKENS, 39, 1, WIRE_TOKENS_LOGPROB_BYTES + WIRE_MAX_BATCH * 4 + 1024, "D>R",         \
      "output tokens, gapless per ticket")                                                         \
    M(finish, FINISH, 40, 1, 1024, "D>R", "the answer is complete")                                \
    M(cancel, CANCEL, 41, 1, 1024, "R>W", "end the ticket at any step")                            \
    M(cancelled, CANCELLED, 42, 1, 1024, "W>R", "ended")                                           \
    M(captured, CAPTURED, 43, 1, WIRE_MAX_CAPTURED + 1024, "W>R",                                  \
      "one layer of one row; before the TOKENS or PREFILL_DONE of its step")                       \
    M(xhello, XHELLO, 64, 1, 65536, "P>D", "first on a data link")                                 \
    M(xready, XREADY, 65, 1, 1024, "D>P", "identity and fingerprint fit")                          \
    M(xrefuse, XREFUSE, 66, 1, 4096, "D>P", "they do not")                                         \
    M(xprobe, XPROBE, 67, 1, 32768, "P>D", "fetch this page, as proof")                            \
    M(xprobed, XPROBED, 68, 1, 4096, "D>P", "outcome")                                             \
    M(offer, OFFER, 69, 1, 32768, "P>D", "one part is ready to be fetched")                        \
    M(ack, ACK, 70, 1, 1024, "D>P", "one part is here, digests right")                             \
    M(nack, NACK, 71, 1, 4096, "D>P", "part refused: the ticket is dead")                          \
    M(xcancel, XCANCEL, 72, 1, 1024, "x", "the ticket is dead on the sender's side")               \
    M(xping, XPING, 73, 1, 1024, "x", "life sign, each second")                                    \
    M(xpong, XPONG, 74, 1, 1024, "x", "answer")                                                    \
    M(xalive, XALIVE, 75, 1, 1024, "P>D", "the ticket's lease goes on")                            \
    M(first, FIRST, 76, 1, 1024, "note", "never a frame: this body is the note of a tail's OFFER")

enum wire_type {
#define M(name, NAME, number, since, cap, dir, note) WIRE_##NAME##_MSG = number,
    WIRE_MESSAGES(M)
#undef M
};

/* --- the structs, from the lists -------------------------------------------------------------- */
#define WIRE_C_u8       uint8_t
#define WIRE_C_u16      uint16_t
#define WIRE_C_u32      uint32_t
#define WIRE_C_u64      uint64_t
#define WIRE_C_i16      int16_t
#define WIRE_C_f32      float
#define WIRE_C_text     struct wire_text
#define WIRE_C_bytes    struct wire_bytes
#define WIRE_C_ids      struct wire_ids
#define WIRE_C_u64s     struct wire_u64s
#define WIRE_C_ticket   struct wire_ticket
#define WIRE_C_sampling struct wire_sampling
#define WIRE_C_part     struct wire_part

#define WIRE_MEMBER(kind, name, max, note) WIRE_C_##kind name;
struct wire_sampling {
    WIRE_SAMPLING(WIRE_MEMBER)
};
#define M(name, NAME, number, since, cap, dir, note)                                               \
    struct wire_##name {                                                                           \
        WIRE_##NAME(WIRE_MEMBER)                                                                   \
    };
WIRE_MESSAGES(M)
#undef M

/* Any message. Spans inside are borrowed. */
struct wire_msg {
    enum wire_type type;
    union {
#define M(name, NAME, number, since, cap, dir, note) struct wire_##name name;
        WIRE_MESSAGES(M)
#undef M
    };
};

/* --- pack and unpack -------------------------------------------------------------------------- */

/* Bytes of the whole frame, header included; or TOW_EINVAL when a field is above its cap. */
int64_t wire_frame_bytes(const struct wire_msg *m);
/* Writes header and body; returns the bytes written, TOW_EINVAL (a field above its cap) or
 * TOW_EFULL (cap too small). */
int64_t wire_pack(const struct wire_msg *m, void *frame, size_t cap);
/* Type known and body within the type's cap? TOW_EWIRE with the reason; TOW_ENOENT for a type not
 * known (skip the body, answer UNKNOWN). */
int wire_check_header(const struct wire_header *h, struct tow_err *err);
/* Body of a header that passed wire_check_header. */
int wire_unpack(struct wire_msg *out, const struct wire_header *h, const void *body,
                struct tow_err *err);
/* Header and body in one piece (data plane). Bytes behind the body are ignored. */
int wire_unpack_frame(struct wire_msg *out, const void *frame, size_t n, struct tow_err *err);

/* One pair per message as well: body only. */
#define M(name, NAME, number, since, cap, dir, note)                                               \
    void wire_put_##name(struct wire_writer *w, const struct wire_##name *m);                      \
    int wire_get_##name(struct wire_##name *m, const void *body, size_t n);
WIRE_MESSAGES(M)
#undef M

const char *wire_type_name(unsigned type); /* "HELLO"; "?" when unknown; static */
/* The step's name for tow_fault(): "send.HELLO", or "take.HELLO" for what came in; static. */
const char *wire_step_name(unsigned type, bool sent);

/* --- items inside spans
 * ---------------------------------------------------------------------------- */
struct wire_fact {
    uint8_t class; /* enum wire_fact_class; others are treated as free */
    struct wire_text field, value;
};
void wire_put_fact(struct wire_writer *w, const struct wire_fact *f);
/* Takes the next fact from *at (start at 0); false at the end. Total on any bytes. */
bool wire_next_fact(struct wire_bytes facts, size_t *at, struct wire_fact *out);

struct wire_bias {
    uint32_t token;
    float bias;
};
uint32_t wire_n_bias(const struct wire_sampling *s);
struct wire_bias wire_bias_at(const struct wire_sampling *s, uint32_t i); /* i < wire_n_bias */

/* Log-probabilities as TOKENS and OFFER carry them. i < ids, k < n_top; has_logprobs set. */
float wire_logprob_at(struct wire_bytes rows, uint8_t n_top, uint32_t i);
void wire_top_at(struct wire_bytes rows, uint8_t n_top, uint32_t i, uint32_t k, uint32_t *token,
                 float *logprob);

static inline bool wire_ticket_same(struct wire_ticket a, struct wire_ticket b)
{
    return a.id == b.id && a.nonce == b.nonce;
}

/* For the doc table: kind, name, note of field i of a type; false behind the last. */
struct wire_field_doc {
    const char *kind, *name, *note;
    uint64_t max;
};
struct wire_type_doc {
    const char *name, *direction, *note;
    unsigned number, since, cap;
};
bool wire_doc_type(unsigned row, struct wire_type_doc *out); /* rows in table order */
bool wire_doc_field(unsigned row, unsigned i, struct wire_field_doc *out);
bool wire_doc_sampling(unsigned i, struct wire_field_doc *out);
bool wire_doc_part(unsigned i, struct wire_field_doc *out);

#endif
