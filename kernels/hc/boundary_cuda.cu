/* kernels/hc/boundary_cuda.cu - from one sub-layer to the next: routed sum, expand, collapse and
 * norm. Four bf16 streams of the deployed width go through them in one pass where the device has
 * clusters of sixteen, few rows by one kernel and many by another; all else op by op.
 */
#include "kernels/hc/boundary_row.cuh"

extern "C" {
int kern_add_cuda(struct kern_stream *s, const struct kern_add *p);
int kern_hc_expand_cuda(struct kern_stream *s, const struct kern_hc_expand *p);
int kern_hc_collapse_cuda(struct kern_stream *s, const struct kern_hc_collapse *p);
int kern_rmsnorm_cuda(struct kern_stream *s, const struct kern_rmsnorm *p);
}

int cuda_hc_clusters(struct kern_stream *s, const void *kernel, unsigned threads, size_t shared,
                     struct cuda_clusters *found)
{
    if (s->arch != 90 || s->number >= CUDA_MAX_DEVICES || shared > (size_t)s->max_shared) return 0;
    struct cuda_clusters *const f = &found[s->number];
    if (f->known) return f->most;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = BLOCKS;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(BLOCKS);
    c.blockDim = dim3(threads);
    c.dynamicSmemBytes = shared;
    c.attrs = &cluster;
    c.numAttrs = 1;
    int most = 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared) !=
            cudaSuccess ||
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
            cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&most, kernel, &c) != cudaSuccess) {
        cudaGetLastError();
        most = 0;
    }
    f->known = true;
    return f->most = most;
}

bool cuda_hc_boundary(struct kern_stream *s, const struct kern_hc_boundary *p)
{
    if (p->act != KERN_BF16 || p->hc != STREAMS || p->D != D || !cuda_aligned16(p->y) ||
        !cuda_aligned16(p->routed) || !cuda_aligned16(p->h) || !cuda_aligned16(p->x) ||
        !cuda_aligned16(p->fn.data) || p->fn.row_bytes % 16 != 0 || !cuda_aligned16(p->post) ||
        !cuda_aligned16(p->comb))
        return false;
    return cuda_hc_boundary_few(s, p) || cuda_hc_boundary_many(s, p);
}

extern "C" int kern_hc_boundary_cuda(struct kern_stream *s, const struct kern_hc_boundary *p)
{
    if (p->T == 0) return 0;
    if (cuda_hc_boundary(s, p)) return cuda_done(s, "hc_boundary");
    const struct kern_add add = kern_hc_boundary_add(p);
    const struct kern_hc_expand expand = kern_hc_boundary_expand(p);
    const struct kern_hc_collapse collapse = kern_hc_boundary_collapse(p);
    const struct kern_rmsnorm norm = kern_hc_boundary_norm(p);
    int rc = p->routed ? kern_add_cuda(s, &add) : 0;
    if (rc == 0 && p->y) rc = kern_hc_expand_cuda(s, &expand);
    if (rc == 0) rc = kern_hc_collapse_cuda(s, &collapse);
    return rc < 0 ? rc : kern_rmsnorm_cuda(s, &norm);
}
