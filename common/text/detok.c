/* text/detok.c - one byte at a time through the held bytes, whole tokens at once where it can. */
#include "common/text/detok.h"

#include <string.h>

#include "common/base/buf.h"
#include "common/text/utf8.h"

#define REPLACEMENT "\xEF\xBF\xBD" /* U+FFFD */

void text_detok_init(struct text_detok *d, const struct text_tokenizer *tok, bool skip_special)
{
    *d = (struct text_detok){.tok = tok, .skip_special = skip_special};
}

/* One byte behind what is held. out NULL: nothing is written. */
static void feed(struct text_detok *d, uint8_t byte, struct tow_buf *out)
{
    uint32_t cp;
    d->held[d->n_held++] = byte;
    int r = text_utf8_next(d->held, d->n_held, &cp);
    if (r == 0) return;
    bool shown = out && !d->of_prompt;
    d->of_prompt = false;
    if (r > 0) {
        if (shown) tow_buf_put(out, d->held, d->n_held);
        d->n_held = 0;
        return;
    }
    if (shown) tow_buf_puts(out, REPLACEMENT);
    bool was_alone = d->n_held == 1;
    d->n_held = 0;
    if (!was_alone) feed(d, byte, out); /* it broke what was held, and begins anew */
}

void text_detok_prompt(struct text_detok *d, const text_id *ids, size_t n)
{
    /* What is unfinished at the end hangs on the last three bytes alone: a character's first byte
     * can be no part of another. */
    uint8_t last[3];
    size_t have = 0;
    while (n > 0 && have < sizeof last) {
        size_t len;
        const uint8_t *bytes = text_tokenizer_peek(d->tok, ids[--n], &len);
        if (text_tokenizer_is_added(d->tok, ids[n])) break; /* a control token ends a character */
        while (len > 0 && have < sizeof last) last[sizeof last - ++have] = bytes[--len];
    }
    d->n_held = 0;
    for (size_t i = sizeof last - have; i < sizeof last; i++) feed(d, last[i], NULL);
    d->of_prompt = d->n_held > 0;
}

void text_detok_push(struct text_detok *d, text_id id, struct tow_buf *out)
{
    size_t len;
    const uint8_t *p = text_tokenizer_peek(d->tok, id, &len);
    if (d->skip_special && text_tokenizer_is_special(d->tok, id)) return;
    size_t i = 0;
    while (i < len && d->n_held > 0) feed(d, p[i++], out);
    size_t begin = i;
    while (i < len) {
        uint32_t cp;
        int r = text_utf8_next(p + i, len - i, &cp);
        if (r <= 0) break;
        i += (size_t)r;
    }
    if (i > begin) tow_buf_put(out, p + begin, i - begin);
    while (i < len) feed(d, p[i++], out);
}

void text_detok_end(struct text_detok *d, struct tow_buf *out)
{
    if (d->n_held > 0 && !d->of_prompt) tow_buf_puts(out, REPLACEMENT);
    d->n_held = 0;
    d->of_prompt = false;
}

void text_detok_all(const struct text_tokenizer *tok, const text_id *ids, size_t n,
                    bool skip_special, struct tow_buf *out)
{
    struct text_detok d;
    text_detok_init(&d, tok, skip_special);
    for (size_t i = 0; i < n; i++) text_detok_push(&d, ids[i], out);
    text_detok_end(&d, out);
}
