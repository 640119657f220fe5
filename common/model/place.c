/* model/place.c - see place.h. One function per kind of thing; a layer is the list of what it
 * has. */
#include "common/model/place.h"

#include "common/base/clock.h"
#include "common/base/err.h"
#include "common/base/log.h"
#include "kernels/dev.h"

enum { SAY_AGAIN_MS = 5000 }; /* a large checkpoint takes a minute: the log shows that it moves */

struct placing {
    struct kern_dev *dev; /* borrowed */
    struct tow_err *err;  /* borrowed */
    int rc;               /* sticky */
    uint64_t bytes;
};

static uint64_t weight_bytes(const struct kern_weight *w)
{
    return (uint64_t)w->n * (uint64_t)w->row_bytes;
}

static void weights(struct placing *p, const struct kern_weight *w, int32_t n)
{
    if (p->rc < 0 || !w || !w[0].data) return;
    p->bytes += (uint64_t)n * weight_bytes(&w[0]);
    p->rc = kern_dev_place(p->dev, (struct kern_weight *)(uintptr_t)w, n, p->err);
}
static void weight(struct placing *p, struct kern_weight *w)
{
    weights(p, w, 1);
}
static const void *bytes(struct placing *p, const void *host, int64_t n)
{
    if (p->rc < 0 || !host) return host;
    const void *placed = kern_dev_place_bytes(p->dev, host, (size_t)n);
    p->bytes += (uint64_t)n;
    if (!placed)
        p->rc = tow_fail(p->err, TOW_ENOMEM, "no device memory for %lld bytes of the model",
                         (long long)n);
    return placed;
}
static const float *floats(struct placing *p, const float *host, int64_t n)
{
    return bytes(p, host, n * (int64_t)sizeof(float));
}
static void vec(struct placing *p, struct kern_vec *v)
{
    v->data = bytes(p, v->data, (int64_t)v->n * kern_dtype_bytes(v->dtype));
}
static void hyper(struct placing *p, struct model_hc *h, int64_t n_scale)
{
    weight(p, &h->fn);
    h->base = floats(p, h->base, h->fn.n);
    h->scale = floats(p, h->scale, n_scale);
}
static void compressor(struct placing *p, struct model_compressor *c, int32_t ratio)
{
    c->ape = floats(p, c->ape, (int64_t)ratio * c->wkv.n);
    weight(p, &c->wkv);
    weight(p, &c->wgate);
    vec(p, &c->norm);
}

static void layer(struct placing *p, struct model_layer *L, const struct model_shape *s)
{
    vec(p, &L->attn_norm);
    vec(p, &L->ffn_norm);
    hyper(p, &L->hc_attn, 3);
    hyper(p, &L->hc_ffn, 3);
    L->sink = floats(p, L->sink, s->H);
    struct kern_weight *const dense[] = {&L->wq_a,      &L->wq_b,       &L->wkv,        &L->wo_a,
                                         &L->wo_b,      &L->index_wq_b, &L->index_proj, &L->gate,
                                         &L->shared_w1, &L->shared_w2,  &L->shared_w3};
    for (size_t i = 0; i < sizeof dense / sizeof *dense; i++) weight(p, dense[i]);
    vec(p, &L->q_norm);
    vec(p, &L->kv_norm);
    compressor(p, &L->comp, L->ratio);
    compressor(p, &L->index_comp, L->ratio);
    L->gate_bias = floats(p, L->gate_bias, s->E);
    L->tid2eid = bytes(p, L->tid2eid, (int64_t)s->V * s->k * L->tid_bytes);
    weights(p, L->w1, s->E);
    weights(p, L->w2, s->E);
    weights(p, L->w3, s->E);
}

int model_weights_place(struct model_weights *w, struct kern_dev *dev, struct tow_err *err)
{
    if (kern_dev_host_memory(dev)) return 0;
    const struct model_shape *s = &w->shape;
    struct placing p = {.dev = dev, .err = err};
    const uint64_t t0 = tow_now_ms();
    const bool tied = w->head.data == w->embed.data;
    weight(&p, &w->embed);
    if (tied)
        w->head = w->embed;
    else
        weight(&p, &w->head);
    vec(&p, &w->norm);
    hyper(&p, &w->hc_head, 1);
    const int32_t n_mtp = w->mtp ? s->n_mtp : 0, n = s->n_layers + n_mtp;
    uint64_t said = t0;
    for (int32_t i = 0; i < n && p.rc == 0; i++) {
        layer(&p, &w->layers[i], s);
        if (tow_now_ms() - said < SAY_AGAIN_MS) continue;
        said = tow_now_ms();
        tow_log(TOW_LOG_INFO, "weights: %d of %d layers, %.1f GB on the device", i + 1, n,
                (double)p.bytes / 1e9);
    }
    for (int32_t i = 0; i < n_mtp && p.rc == 0; i++) {
        struct model_mtp *m = &w->mtp[i];
        weight(&p, &m->e_proj);
        weight(&p, &m->h_proj);
        vec(&p, &m->enorm);
        vec(&p, &m->hnorm);
        vec(&p, &m->norm);
        hyper(&p, &m->hc_head, 1);
    }
    if (p.rc == 0) {
        const double s_taken = (double)(tow_now_ms() - t0) / 1e3;
        tow_log(TOW_LOG_INFO, "weights: %.2f GB on the device in %.1f s, %.1f GB/s",
                (double)p.bytes / 1e9, s_taken, s_taken > 0 ? (double)p.bytes / 1e9 / s_taken : 0);
    }
    return p.rc;
}
