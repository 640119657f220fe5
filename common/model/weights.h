/* model/weights.h - a loaded checkpoint: each tensor of each layer as a view into the mapped files.
 *
 * Why      The forward pass asks for "layer 3, wq_a" and gets a kern_weight, whatever names and
 *          formats the checkpoint uses: native, plain, NVFP4 experts, fp8 experts, Hugging Face
 *          names.
 * Holds    After model_weights_open every tensor the shape asks for was found exactly once, with
 *          the dtype and shape its role wants; every scale is finite and positive; every tid2eid
 *          entry is a valid expert.
 * Copies   None of a weight, except: F16 (widened to F32) and fp4 scales stored as F32 (turned into
 *          ue8m0; refused when they are no powers of two). Vectors of float32 are copied only where
 *          the file has them misaligned or in another type.
 * Errors   One line: file, tensor, expected, found. Missing tensors: counts and the first names.
 * Threads  Read-only after open. [any thread]
 */
#ifndef MODEL_WEIGHTS_H
#define MODEL_WEIGHTS_H

#include "common/model/safetensors.h"
#include "common/model/shape.h"
#include "common/text/config.h"

struct tow_err;

/* Hyper-connection: fn [(2+hc)*hc or hc, hc*D], base [fn.n], scale [3] or [1]. */
struct model_hc {
    struct kern_weight fn;
    const float *base, *scale;
};

struct model_compressor {
    const float *ape;              /* [ratio, c*e] */
    struct kern_weight wkv, wgate; /* [c*e, D] */
    struct kern_vec norm;          /* [e] */
};

struct model_layer {
    int32_t ratio;
    struct kern_vec attn_norm, ffn_norm;
    struct model_hc hc_attn, hc_ffn;
    /* attention */
    const float *sink; /* [H] */
    struct kern_weight wq_a, wq_b, wkv, wo_a, wo_b;
    struct kern_vec q_norm, kv_norm;
    struct model_compressor comp; /* ratio > 0; else comp.ape is NULL */
    /* indexer, ratio 4; else index_wq_b.data is NULL */
    struct kern_weight index_wq_b, index_proj;
    struct model_compressor index_comp;
    /* experts */
    struct kern_weight gate;
    const float *gate_bias;                 /* [E]; NULL in hash layers */
    const void *tid2eid;                    /* [V, k]; NULL unless a hash layer; any alignment */
    int32_t tid_bytes;                      /* 8 or 4 */
    const struct kern_weight *w1, *w2, *w3; /* [E] each */
    struct kern_weight shared_w1, shared_w2, shared_w3;
};

/* What an MTP block has besides its layer. */
struct model_mtp {
    struct kern_weight e_proj, h_proj;
    struct kern_vec enorm, hnorm, norm;
    struct model_hc hc_head;
};

struct model_load_report {
    size_t n_expected, n_found; /* tensors the shape asks for; each found exactly once */
    size_t n_unused;            /* tensors in the files that nothing asked for */
    size_t n_files;
    int32_t n_stored; /* main layers in the files; below shape.n_layers: the others repeat them */
    uint64_t file_bytes;
    uint64_t copied_bytes;  /* what had to be copied or converted, see Copies */
    bool mtp_absent;        /* config.json promises MTP blocks, the files have none: drafts off */
    bool hf_names;          /* some tensors carry Hugging Face names */
    bool input_scales;      /* NVFP4 experts carry input_scale: 4-bit activations are possible */
    enum kern_wfmt experts; /* format of the routed experts */
};

struct model_weights {
    struct text_config config;
    struct model_shape shape;
    struct kern_weight embed, head; /* [V, D] */
    struct kern_vec norm;
    struct model_hc hc_head;
    struct model_layer *layers; /* owned; shape.n_layers + shape.n_mtp */
    struct model_mtp *mtp;      /* owned; shape.n_mtp, may be NULL */
    struct model_load_report report;
    struct model_weights_own *own; /* owned: files, copies */
};

struct model_weights_options {
    bool need_input_scales; /* 4-bit activations were asked for: NVFP4 experts without input_scale
                               are refused */
    bool no_mtp;            /* leave the MTP blocks out even when they are there */
    /* 0: as many main layers as the checkpoint has. More (for benchmarks: a model as deep as the
     * released one from a few gigabytes of files): those after its last read the tensors of its own
     * layers once more, of those behind the hash-routed ones, in turn. Each gets memory of its own
     * where weights are placed; it is another model, with another fingerprint. TOW_ECONFIG where
     * there are fewer, or none to repeat. */
    int32_t n_layers;
};

/* Loads and checks the whole checkpoint. options may be NULL. Caller frees with
 * model_weights_close(). */
int model_weights_open(struct model_weights **out, const char *dir,
                       const struct model_weights_options *options, struct tow_err *err);
void model_weights_close(struct model_weights *w); /* NULL is fine */

/* XXH3 over the config's fields, every tensor's name, dtype, shape and size, and 64 bytes from the
 * middle of each: 16 hex digits. Two folders with the same fingerprint hold the same revision of
 * the same model in the same form. It does not find a damaged byte: that needs all of them read. */
enum { MODEL_FINGERPRINT_CHARS = 17 };
void model_weights_fingerprint(const struct model_weights *w, char out[MODEL_FINGERPRINT_CHARS]);
/* The same from the folder, for a process that does not run the model. */
int model_fingerprint(const char *dir, char out[MODEL_FINGERPRINT_CHARS], struct tow_err *err);

#endif
