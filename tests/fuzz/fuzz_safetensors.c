/* Any bytes are a safetensors file or a refusal with a message;
 * what is accepted lies inside the bytes. */
#include "common/base/err.h"
#include "common/model/safetensors.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tow_err err = {0};
    struct model_safetensors *f = NULL;
    if (model_safetensors_parse(&f, "fuzz", data, size, &err) != 0) {
        if (err.code == 0 || err.msg[0] == 0 || f) abort();
        return 0;
    }
    uint64_t sum = 0;
    for (size_t i = 0; i < model_safetensors_count(f); i++) {
        const struct model_tensor *t = model_safetensors_at(f, i);
        const uint8_t *p = t->data;
        if (model_safetensors_find(f, t->name) != t) abort();
        if (p < data || p > data + size || t->bytes > (uint64_t)(data + size - p)) abort();
        for (uint64_t k = 0; k < t->bytes; k++) sum += p[k];
        char shape[64];
        sum += strlen(model_tensor_shape_text(t, shape, sizeof shape));
    }
    model_safetensors_meta(f, "format");
    model_safetensors_close(f);
    return sum == UINT64_MAX; /* keeps the reads */
}
