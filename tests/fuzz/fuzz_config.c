/* Any bytes are a config.json or a refusal with a message; what is accepted is within the
 * documented limits. The part after the first NUL, if there is one, is generation_config.json. */
#include "common/base/err.h"
#include "common/text/config.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *nul = size ? memchr(data, 0, size) : NULL;
    size_t len = nul ? (size_t)(nul - data) : size;
    const char *gen = nul ? (const char *)nul + 1 : NULL;
    struct tow_err err = {0};
    struct text_config c;
    int rc =
        text_config_parse(&c, "fuzz", (const char *)data, len, gen, nul ? size - len - 1 : 0, &err);
    if (rc != 0) {
        if (err.code != rc || err.msg[0] == 0) abort();
        return 0;
    }
    if (c.hidden_size < 1 || c.n_layers < 1 || c.n_layers + c.n_mtp > TEXT_CONFIG_MAX_LAYERS ||
        c.window < 1 || c.rope_dim < 2 || c.rope_dim > c.head_dim ||
        c.n_experts_per_tok > c.n_experts || c.n_eos < 1 || c.n_eos > TEXT_CONFIG_MAX_EOS ||
        (c.index_dim & (c.index_dim - 1)) || c.index_topk < 1)
        abort();
    for (int i = 0; i < c.n_layers + c.n_mtp; i++)
        if (c.ratios[i] < 0 || c.ratios[i] == 1 || c.ratios[i] > TEXT_CONFIG_MAX_RATIO) abort();
    return 0;
}
