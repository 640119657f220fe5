/* kernels/cuda/tma.cu - descriptions of tiles for the copy engine. The driver makes them; it is
 * asked for the function at run time, so that nothing links against the driver. */
#include "kernels/cuda/tma.cuh"

#include <cuda_runtime.h>

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static encode_fn driver_encode(void)
{
    static encode_fn fn;
    if (!fn) {
        void *p = NULL;
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault,
                                             &found) == cudaSuccess &&
            found == cudaDriverEntryPointSuccess)
            fn = (encode_fn)p;
    }
    return fn;
}

static bool describe(CUtensorMap *map, const void *base, int64_t n_rows, int64_t width, int64_t ld,
                     int rows, int bytes, CUtensorMapSwizzle swizzle)
{
    const encode_fn encode = driver_encode();
    const cuuint64_t dims[2] = {(cuuint64_t)width, (cuuint64_t)n_rows};
    const cuuint64_t strides[1] = {(cuuint64_t)ld};
    const cuuint32_t box[2] = {(cuuint32_t)bytes, (cuuint32_t)rows}, steps[2] = {1, 1};
    return encode &&
           encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, (void *)base, dims, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool cuda_tile_map(CUtensorMap *map, const void *base, int64_t n_rows, int64_t width, int64_t ld,
                   int rows)
{
    return describe(map, base, n_rows, width, ld, rows, TILE_BYTES, CU_TENSOR_MAP_SWIZZLE_128B);
}

bool cuda_half_tile_map(CUtensorMap *map, const void *base, int64_t n_rows, int64_t width,
                        int64_t ld, int rows)
{
    return describe(map, base, n_rows, width, ld, rows, TILE_BYTES / 2, CU_TENSOR_MAP_SWIZZLE_NONE);
}
