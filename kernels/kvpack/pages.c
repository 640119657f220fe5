/* kvpack/pages.c - shape contract of kernels/pages.h, and its twin over host memory: the
 * definition. */
#include "kernels/pages.h"

#include "common/base/err.h"
#include "kernels/kvpack/digest.h"

#include <string.h>

int kern_pages_check(const struct kern_pages *p)
{
    if (p->n < 0 || p->page_bytes < DIGEST_BLOCK || p->page_bytes % DIGEST_BLOCK) return TOW_EINVAL;
    if (p->n == 0) return 0;
    if (!p->pool || !p->ids || (!p->packed && !p->digests) || (p->unpack && !p->packed))
        return TOW_EINVAL;
    return ((uintptr_t)p->pool | (uintptr_t)p->packed) % 16 == 0 &&
                   (uintptr_t)p->digests % sizeof(uint64_t) == 0
               ? 0
               : TOW_EINVAL;
}

static uint64_t digest(const uint8_t *x, int64_t bytes)
{
    uint64_t number[DIGEST_NUMBERS];
    memcpy(number, digest_start, sizeof number);
    for (int64_t at = 0; at < bytes; at += DIGEST_STRIPE) {
        const int64_t stripe = at % DIGEST_BLOCK / DIGEST_STRIPE;
        const uint64_t *keys =
            at + DIGEST_STRIPE == bytes ? digest_last_keys : digest_secret + stripe;
        if (at > 0 && stripe == 0)
            for (int i = 0; i < DIGEST_NUMBERS; i++)
                number[i] = digest_scramble(number[i], digest_secret[16 + i]);
        for (int i = 0; i < DIGEST_NUMBERS; i++) {
            uint64_t word;
            memcpy(&word, x + at + 8 * i, sizeof word);
            number[i] += digest_product(word, keys[i]);
            number[i ^ 1] += word;
        }
    }
    uint64_t sum = 0;
    for (int i = 0; i < DIGEST_NUMBERS; i += 2)
        sum +=
            digest_fold(number[i] ^ digest_merge_keys[i], number[i + 1] ^ digest_merge_keys[i + 1]);
    return digest_end(sum, bytes);
}

int kern_pages_cpu(const struct kern_pages *p)
{
    for (int32_t i = 0; i < p->n; i++) {
        uint8_t *page = p->pool + p->ids[i] * p->page_bytes;
        uint8_t *packed = p->packed ? p->packed + i * p->page_bytes : NULL;
        if (packed && p->unpack) memcpy(page, packed, (size_t)p->page_bytes);
        if (packed && !p->unpack) memcpy(packed, page, (size_t)p->page_bytes);
        if (p->digests) p->digests[p->ids[i]] = digest(page, p->page_bytes);
    }
    return 0;
}
