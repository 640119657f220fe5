/* kernels/kvpack/load_cpu.h - kern_kv_load and kern_ik_load, sixteen values at a time,
 * the same bits. */
#ifndef KERN_KVPACK_LOAD_CPU_H
#define KERN_KVPACK_LOAD_CPU_H

#include "kernels/cpu/row.h"
#include "kernels/kv_layout.h"

/* Row i of a part of n; out is padded with zeros to a multiple of 16. */
static inline __attribute__((unused)) void kern_kv_row(enum kern_kv_fmt fmt, const uint8_t *part,
                                                       int64_t n, int64_t i, float *out, int32_t d,
                                                       int32_t rd)
{
    if (fmt == KERN_KV_FP8) {
        int32_t nope = d - rd, scales = (nope / 64 + 7) / 8 * 8;
        const uint8_t *row = part + i * (d + rd), *sc = part + n * (d + rd) + i * scales;
        v_seen seen = v_seen_none();
        for (int32_t c = 0; c < nope; c += 64) {
            v16 s = v_set1(kern_ue8m0_decode(sc[c / 64]) * V_E4M3X2_SCALE), lo, hi;
            for (int32_t k = c; k < c + 64; k += 32) {
                v_load_e4m3x2(row + k, &lo, &hi, &seen);
                v_store(out + k, v_mul(lo, s));
                v_store(out + k + 16, v_mul(hi, s));
            }
        }
        if (v_seen_nan(seen)) kern_kv_load(fmt, part, n, i, out, d, rd);
        kern_row_load(row + nope, KERN_BF16, rd, out + nope);
    } else {
        int b = fmt == KERN_KV_BF16 ? 2 : 4;
        kern_row_load(part + i * d * b, b == 2 ? KERN_BF16 : KERN_F32, d, out);
    }
}

static inline __attribute__((unused)) void kern_ik_row(enum kern_ik_fmt fmt, const uint8_t *part,
                                                       int64_t n, int64_t i, float *out, int32_t w)
{
    float s;
    switch (fmt) {
    case KERN_IK_FP4:
        for (int32_t k = 0; k < w; k += 32) {
            const uint8_t *p = part + i * (w / 2) + k / 2;
            v16 t = v_mul(v_load(kern_e2m1_value),
                          v_set1(kern_ue8m0_decode(part[n * (w / 2) + i * (w / 32) + k / 32])));
            v_store(out + k, v_unmix(v_lookup16_mixed(p, t)));
            v_store(out + k + 16, v_unmix(v_lookup16_mixed(p + 8, t)));
        }
        break;
    case KERN_IK_FP8:
        memcpy(&s, part + n * w + i * 4, 4);
        for (int32_t k = 0; k < w; k += 16)
            v_store(out + k, v_mul(v_load_e4m3(part + i * w + k), v_set1(kern_f32_scale(s))));
        break;
    case KERN_IK_BF16: kern_row_load(part + i * w * 2, KERN_BF16, w, out); break;
    case KERN_IK_F32: kern_row_load(part + i * w * 4, KERN_F32, w, out); break;
    }
}

#endif
