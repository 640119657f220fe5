#!/usr/bin/env python3
"""What PyTorch, its libraries and two published kernel libraries need on this card for the work of our kernels,
at the shapes of tests/gpu/bench_*.c: to be read beside those lines. Needs torch with CUDA; without it says so,
exit 77.

    peers.py [--flash-mla FILE] [--deep-gemm FOLDER] [--only PART OF A LINE'S NAME]
    make gpu-bench PEERS="the same flags"

--flash-mla  FlashMLA's kernels as a library of torch operators: flash_mla/_C_legacy.abi3.so of the package
             sgl-flash-mla 1.0.0, which holds the kernels for Hopper and for rows of 584 bytes.
--deep-gemm  where the package deep_gemm is to be found (sgl-deep-gemm 0.1.3 and apache-tvm-ffi 0.1.9 unpacked
             beside each other are for torch 2.11); it compiles its kernels when they are first called.

Time: median of five rounds, each a graph of calls between two events; buffers taken in turn where one set fits
the second-level cache ("same buffers" says where not, which is how tests/gpu/bench_attn.c calls ours). Data:
random. A peer that is not here or fails is one line. Attention and products of the two libraries are compared
with float32 before they are timed; a line says by how much they differ, and more than a hundredth is an error.
"""
import argparse
import sys

try:
    import torch
except ImportError:
    torch = None

DEV = "cuda"
BF16, FP8 = torch and torch.bfloat16, torch and torch.float8_e4m3fn
L2 = 64 << 20
FAILED = []
ONLY = ""
NAMES = None  # a set: names are collected, and nothing runs
N_TIMED = 0


def turns(nbytes, most=16):
    return max(1, min(most, -(-2 * L2 // int(nbytes))))


def graph_of(call, n_sets, n):
    """A graph of n calls, or None where one of them cannot be captured."""
    g = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(g):
            for i in range(n):
                call(i % n_sets)
    except Exception:
        torch.cuda.synchronize()
        return None
    return g


def timed(call, n_sets, budget_ms=60.0):
    """Microseconds of call(i), i counting up modulo n_sets."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def ms_of(enqueue):
        begin.record()
        enqueue()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def all_sets():
        for i in range(n_sets):
            call(i)

    all_sets()
    ms = ms_of(all_sets) / n_sets
    n = n_sets * max(1, min(200, int(budget_ms / 6 / max(ms, 1e-3))) // n_sets)
    g = graph_of(call, n_sets, n)

    def once():
        if g:
            g.replay()
        else:
            for i in range(n):
                call(i % n_sets)

    once()
    return 1000 * sorted(ms_of(once) / n for _ in range(5))[2]


def line(name, shape, us, flops=0.0, nbytes=0.0):
    global N_TIMED
    N_TIMED += 1
    rate = f"{flops / us / 1e6:8.0f} TFLOP/s" if flops else f"{nbytes / us / 1e6:8.2f} TB/s   "
    print(f"{name:34} {shape:30} {us:10.1f} us {rate}", flush=True)


def agree(name, shape, got, want):
    """Says how far the peer is from float32; a wrong call would time something else."""
    d = ((got.float() - want).norm() / want.norm()).item()
    print(f"{name:34} {shape:30} differs by {d:.1e} of the norm", flush=True)
    if not d < 1e-2:
        FAILED.append(name)


def peer(name, shape, run):
    if NAMES is not None:
        NAMES.add(name)
    if ONLY not in name or NAMES is not None:
        return
    try:
        run(name, shape)
    except Exception as e:  # a missing op is a finding, not a failure
        print(f"{name:34} {shape:30} not here: {str(e).splitlines()[0][:90]}", flush=True)
    torch.cuda.empty_cache()


def matmul(M, N, K):
    def run(name, shape):
        n = turns((N + M) * K * 2)
        x = [torch.randn(M, K, device=DEV, dtype=BF16) for _ in range(n)]
        w = [torch.randn(N, K, device=DEV, dtype=BF16) for _ in range(n)]
        us = timed(lambda i: torch.matmul(x[i], w[i].t()), n)
        line(name, shape, us, flops=2.0 * M * N * K if M > 512 else 0, nbytes=2.0 * N * K)

    return run


def blockwise(M, N, K):
    """cuBLASLt's product of e4m3 codes with a scale for 1 x 128 of x and for 128 x 128 of w; codes are given."""

    def run(name, shape):
        from torch.nn.functional import ScalingType, scaled_mm

        n = turns((N + M) * K)
        x, w, sx, sw = [], [], [], []
        for _ in range(n):
            x.append(torch.randn(M, K, device=DEV).to(torch.float8_e4m3fn))
            w.append(torch.randn(N, K, device=DEV).to(torch.float8_e4m3fn))
            sx.append(torch.rand(K // 128, M, device=DEV).t())
            sw.append(torch.rand(N // 128, K // 128, device=DEV).t())

        def call(i):
            rows, blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
            return scaled_mm(x[i], w[i].t(), sx[i], rows, sw[i], blocks, output_dtype=BF16)

        us = timed(call, n)
        line(name, shape, us, flops=2.0 * M * N * K if M > 512 else 0, nbytes=1.0 * N * K)

    return run


def grouped(rows, experts, N, K):
    def run(name, shape):
        each = rows // experts
        x = torch.randn(rows, K, device=DEV, dtype=BF16)
        w = torch.randn(experts, N, K, device=DEV, dtype=BF16).transpose(-2, -1)
        offs = torch.arange(1, experts + 1, device=DEV, dtype=torch.int32) * each
        us = timed(lambda i: torch._grouped_mm(x, w, offs=offs), 1)
        line(name, shape, us, flops=2.0 * rows * N * K)

    return run


def topk(B, n, k):
    def run(name, shape):
        sets = turns(B * n * 4)
        s = [torch.randn(B, n, device=DEV) for _ in range(sets)]
        us = timed(lambda i: torch.topk(s[i], k), sets)
        line(name, shape, us, nbytes=4.0 * B * n)

    return run


def scores(B, n):
    """relu(q . k) weighted over 64 heads, as three torch ops; keys widened before."""

    def run(name, shape):
        q = torch.randn(B, 64, 128, device=DEV, dtype=BF16)
        k = torch.randn(B, n, 128, device=DEV, dtype=BF16)
        w = torch.randn(B, 64, 1, device=DEV, dtype=BF16)

        def call(i):
            s = torch.matmul(k, q.transpose(1, 2)).relu_()
            return torch.matmul(s, w)

        line(name, shape, timed(call, 1), nbytes=256.0 * B * n)

    return run


def attention(T, n, heads=64, d=512):
    """Gathered keys in bf16, one set a row, keys are values: gather, matmul, softmax, matmul."""

    def run(name, shape):
        pool = torch.randn(16384, d, device=DEV, dtype=BF16)
        ids = torch.randint(0, 16384, (T, n), device=DEV)
        q = torch.randn(T, heads, d, device=DEV, dtype=BF16)

        def call(i):
            kv = pool[ids]  # T, n, d
            p = torch.softmax(torch.matmul(q, kv.transpose(1, 2)).float() * d**-0.5, -1)
            return torch.matmul(p.to(BF16), kv)

        us = timed(call, 1)
        line(name, shape, us, flops=4.0 * T * n * heads * d)

    return run


class FlashMLA:
    """Sparse attention over 128 sequences that end at 64K: of each 128 rows of a window and 512 of 16,384 entries."""

    H, D, ROW, BLOCK, SEQS, WINDOW, ENTRIES, TOPK = 64, 512, 584, 64, 128, 128, 16384, 512
    SCALE = 512**-0.5

    def __init__(self, path):
        torch.ops.load_library(path)
        self.ops = torch.ops.flash_mla_legacy
        self.sink = torch.randn(self.H, device=DEV)

    def pool(self, blocks):
        """Blocks of 64 rows: of each row 448 codes and 64 bf16, then eight scales a row, padded to 576 bytes."""
        n, B = min(blocks, 256), self.BLOCK
        codes = torch.randn(n, B, 448, device=DEV).to(FP8).view(torch.uint8)
        turned = torch.randn(n, B, 64, device=DEV, dtype=BF16).view(torch.uint8)
        scales = torch.randint(124, 129, (n, B * 8), device=DEV, dtype=torch.uint8)
        used = torch.cat([torch.cat([codes, turned], -1).view(n, -1), scales], -1)
        block = -(-used.shape[1] // 576) * 576
        out = torch.zeros(blocks, block, device=DEV, dtype=torch.uint8)
        for i in range(0, blocks, n):
            out[i : i + n, : used.shape[1]] = used[: blocks - i]
        return out[:, : used.shape[1]].view(blocks, B, 1, self.ROW)

    def rows(self, pool, ids):
        """The rows of some ids, widened to float32."""
        B = self.BLOCK
        flat = pool.view(pool.shape[0], -1)
        at = (ids // B).long(), (ids % B).long()
        row = flat[:, : B * 576].view(-1, B, 576)[at]
        scale = flat[:, B * 576 :].view(-1, B, 8)[at][..., :7]
        codes = row[..., :448].contiguous().view(FP8).float().view(*ids.shape, 7, 64)
        codes = codes * torch.exp2(scale.float() - 127)[..., None]
        return torch.cat([codes.flatten(-2), row[..., 448:].contiguous().view(BF16).float()], -1)

    def reference(self, q, keys):
        """q: rows, heads, width; keys: rows, keys, width; with the sink in the denominator."""
        s = torch.einsum("thd,tkd->thk", q.float(), keys) * self.SCALE
        p = torch.softmax(torch.cat([s, self.sink[None, :, None].expand(len(s), -1, 1)], -1), -1)
        return torch.einsum("thk,tkd->thd", p[..., :-1], keys)

    def choose(self, n_rows):
        """One in each of 512 equal parts, as an indexer that looks everywhere."""
        part = self.ENTRIES // self.TOPK
        at = torch.randint(0, part, (n_rows, self.TOPK), device=DEV)
        return at + part * torch.arange(self.TOPK, device=DEV)

    def decode(self, B, same=False):
        def run(name, shape):
            if not hasattr(self, "entries"):
                self.entries = self.pool(self.SEQS * self.ENTRIES // self.BLOCK)
                self.window = self.pool(self.SEQS * self.WINDOW // self.BLOCK)
                self.pages = torch.randperm(self.entries.shape[0], device=DEV)
            n = 1 if same else turns(B * (self.H * self.D * 4 + 640 * self.ROW), 128)
            sets = []
            for s in range(n):
                seq = (s * B + torch.arange(B, device=DEV)) % self.SEQS
                e = self.choose(B) + seq[:, None] * self.ENTRIES
                e = self.pages[e // self.BLOCK] * self.BLOCK + e % self.BLOCK
                w = seq[:, None] * self.WINDOW + torch.arange(self.WINDOW, device=DEV)
                q = torch.randn(B, 1, self.H, self.D, device=DEV, dtype=BF16)
                sets.append((q, w.int()[:, None], e.int()[:, None]))
            plan = [None, None]  # how keys are spread over the card; made by the first call, then given

            def call(i):
                q, w, e = sets[i]
                out = self.ops.sparse_decode_fwd(
                    q, self.window, w, None, self.sink, *plan, self.entries, e, None, self.D, self.SCALE, "V4"
                )
                plan[:] = out[2:]
                return out[0]

            q, w, e = sets[0]
            keys = torch.cat([self.rows(self.window, w[:4, 0]), self.rows(self.entries, e[:4, 0])], 1)
            agree(name, shape, call(0)[:4, 0], self.reference(q[:4, 0], keys))
            us = timed(call, n)
            line(name, shape, us, flops=4.0 * B * 640 * self.H * self.D)

        return run

    def prefill(self, T):
        def run(name, shape):
            kv = torch.randn(self.ENTRIES + self.WINDOW + T, 1, self.D, device=DEV, dtype=BF16)
            q = torch.randn(T, self.H, self.D, device=DEV, dtype=BF16)
            w = self.ENTRIES + torch.arange(T, device=DEV)[:, None] + torch.arange(self.WINDOW, device=DEV)
            ids = torch.cat([w, self.choose(T)], 1).int()

            def call(i):
                return self.ops.sparse_prefill_fwd(
                    q, kv, ids[:, None], self.SCALE, self.D, self.sink, None, False, False
                )[0]

            keys = kv[ids[:4].long(), 0].float()
            agree(name, shape, call(0)[:4], self.reference(q[:4], keys))
            us = timed(call, 1)
            line(name, shape, us, flops=4.0 * T * 640 * self.H * self.D)

        return run

    def all(self):
        for B in (1, 8, 16, 32, 64, 128):
            shape = f"{B} rows, 128 + 512 keys of 584 B"
            peer("FlashMLA sparse decode", shape, self.decode(B))
            peer("FlashMLA sparse decode, same buffers", shape, self.decode(B, True))
        peer("FlashMLA sparse prefill", "8192 rows, 640 keys, bf16", self.prefill(8192))


class DeepGEMM:
    """Products of e4m3 codes, scales by 1 x 128 of rows and 128 x 128 of weights; scores of an indexer."""

    def __init__(self, folder):
        sys.path.insert(0, folder)
        import deep_gemm

        self.dg = deep_gemm

    @staticmethod
    def codes(*shape):
        return torch.randn(*shape, device=DEV).to(FP8)

    @staticmethod
    def row_scales(M, K):
        return torch.rand(K // 128, M, device=DEV).t()  # as the kernels want them: a column a piece of rows

    @staticmethod
    def product(x, sx, w, sw):
        a = x.float().view(len(x), -1, 128) * sx[..., None]
        b = w.float() * sw.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return a.flatten(1) @ b.t()

    def dense(self, M, N, K):
        def run(name, shape):
            n = turns((N + M) * K)
            x = [(self.codes(M, K), self.row_scales(M, K)) for _ in range(n)]
            w = [(self.codes(N, K), torch.rand(N // 128, K // 128, device=DEV)) for _ in range(n)]
            out = torch.empty(M, N, device=DEV, dtype=BF16)

            def call(i):
                self.dg.fp8_gemm_nt(x[i], w[i], out)

            call(0)
            agree(name, shape, out[:64], self.product(x[0][0][:64], x[0][1][:64], *w[0]))
            us = timed(call, n)
            line(name, shape, us, flops=2.0 * M * N * K if M > 512 else 0, nbytes=1.0 * N * K)

        return run

    def grouped(self, pairs, E, N, K, align):
        """Rows of an expert together and padded to `align`; FLOPs are those of the pairs."""

        def run(name, shape):
            self.dg._C.set_mk_alignment_for_contiguous_layout(align)
            count = torch.bincount(torch.randint(0, E, (pairs,)), minlength=E)
            padded = (count + align - 1) // align * align
            M = int(padded.sum())
            group = torch.repeat_interleave(torch.arange(E), padded).int().to(DEV)
            x = self.codes(M, K), self.row_scales(M, K)
            w = torch.randn(E // 8, N, K, device=DEV, dtype=BF16).to(FP8).repeat(8, 1, 1)
            sw = torch.rand(E, N // 128, K // 128, device=DEV)
            out = torch.empty(M, N, device=DEV, dtype=BF16)

            def call(i):
                self.dg.m_grouped_fp8_gemm_nt_contiguous(x, (w, sw), out, group)

            call(0)
            agree(name, shape, out[-64:], self.product(x[0][-64:], x[1][-64:], w[-1], sw[-1]))
            line(name, f"{shape} ({M} rows)", timed(call, 1), flops=2.0 * pairs * N * K)

        return run

    @staticmethod
    def scores(q, keys, scale, weights):
        s = torch.einsum("hd,nd->hn", q.float(), keys.float()).relu()
        return (s * weights[:, None]).sum(0) * scale

    def paged(self, B, n):
        def run(name, shape):
            blocks, D = n // 64, 128
            keys = self.codes(4096, 64, D).view(torch.uint8).flatten(1)
            scales = torch.rand(4096, 64, device=DEV).view(torch.uint8)
            pool = torch.cat([keys, scales], 1).repeat(-(-B * blocks // 4096), 1)[: B * blocks]
            pool = pool.view(B * blocks, 64, 1, D + 4)
            table = torch.randperm(B * blocks, device=DEV).int().view(B, blocks)
            q, weights = self.codes(B, 1, 64, D), torch.randn(B, 64, device=DEV)
            length = torch.full((B, 1), n, device=DEV, dtype=torch.int32)
            plan = self.dg.get_paged_mqa_logits_metadata(length, 64, self.dg.get_num_sms())

            def call(i):
                return self.dg.fp8_paged_mqa_logits(q, pool, weights, length, table, plan, n, False)

            at = pool.view(B * blocks, -1)[table[0, :4].long()]
            k, s = at[:, : 64 * D].contiguous().view(FP8), at[:, 64 * D :].contiguous().view(torch.float32)
            want = self.scores(q[0, 0], k.view(-1, D), s.flatten(), weights[0])
            agree(name, shape, torch.from_dlpack(call(0))[0, :256], want)
            line(name, shape, timed(call, 1), nbytes=132.0 * B * n)

        return run

    def chunk(self, T, n, ratio=4):
        """Rows at the end of the context: row t sees the entries before it."""

        def run(name, shape):
            D = 128
            keys, scales = self.codes(n, D), torch.rand(n, device=DEV)
            q, weights = self.codes(T, 64, D), torch.randn(T, 64, device=DEV)
            first = torch.zeros(T, device=DEV, dtype=torch.int32)
            seen = ((n * ratio - T + 1 + torch.arange(T, device=DEV)) // ratio).int()

            def call(i):
                return self.dg.fp8_mqa_logits(q, (keys, scales), weights, first, seen, False)

            want = self.scores(q[0], keys[:256], scales[:256], weights[0])
            agree(name, shape, torch.from_dlpack(call(0))[0, :256], want)
            line(name, shape, timed(call, 1), flops=2.0 * float(seen.sum()) * 64 * D)

        return run

    def all(self):
        for M in (32, 128, 8192):
            for what, N, K in (("wq_b", 32768, 1024), ("wo_b", 4096, 8192), ("shared w1", 2048, 4096)):
                peer(f"{what}, DeepGEMM fp8", f"{M} x {N} x {K}", self.dense(M, N, K))
        for align in (128, 64):
            for what, N, K in (("w1+w3", 4096, 4096), ("w2", 4096, 2048)):
                shape = f"49152 pairs, 256 experts, by {align}"
                peer(f"experts {what}, DeepGEMM fp8", shape, self.grouped(49152, 256, N, K, align))
        for B, n in ((1, 262144), (32, 131072)):
            peer("index scores, DeepGEMM fp8 paged", f"{B} rows of {n}", self.paged(B, n))
        peer("index scores, DeepGEMM fp8", "8192 rows at 65536 tokens", self.chunk(8192, 16384))


def library(name, make):
    """All lines of a library, or one that says why it is not here."""
    try:
        lib = make()
    except Exception as e:
        print(f"{name}: not here: {(str(e) or repr(e)).splitlines()[0][:120]}", flush=True)
        FAILED.append(name)
        return
    lib.all()


def torch_rows():
    for M in (1, 32, 64, 128, 8192):
        for what, N, K in (("wq_b", 32768, 1024), ("wo_b", 4096, 8192), ("wq_a + wkv", 1536, 4096)):
            peer(f"{what}, torch.matmul bf16", f"{M} x {N} x {K}", matmul(M, N, K))
    for M in (16, 64, 128, 8192):
        for what, N, K in (("wq_b", 32768, 1024), ("wo_b", 4096, 8192), ("shared w1", 2048, 4096)):
            peer(f"{what}, cuBLASLt fp8 by blocks", f"{M} x {N} x {K}", blockwise(M, N, K))
    for M in (1, 32, 128):
        peer("head, torch.matmul bf16", f"{M} x 129280 x 4096", matmul(M, 129280, 4096))
    for rows in (8192 * 6,):
        peer("experts w1+w3, _grouped_mm bf16", f"{rows} pairs, 256 experts", grouped(rows, 256, 4096, 4096))
        peer("experts w2, _grouped_mm bf16", f"{rows} pairs, 256 experts", grouped(rows, 256, 4096, 2048))
    for B, n in ((1, 262144), (8, 262144), (32, 131072), (128, 262144), (1024, 16384)):
        peer("torch.topk 512", f"{B} rows of {n}", topk(B, n, 512))
    for B, n in ((1, 262144), (32, 131072)):
        peer("index scores, torch bf16 keys", f"{B} rows of {n}", scores(B, n))
    for T in (1, 32, 128, 1024):
        peer("attention 640 keys, torch bf16", f"{T} rows, 64 heads", attention(T, 640))


def names_of(*libraries):
    """Of all lines, where there is no torch too: all() of an object that was never opened, for peer() only notes
    names then."""
    global NAMES
    NAMES = names = set()
    for lib in libraries:
        lib.all(object.__new__(lib))
    torch_rows()
    NAMES = None
    return sorted(names)


def main():
    global ONLY
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--flash-mla", metavar="FILE", help="library of FlashMLA's operators for this torch")
    ap.add_argument("--deep-gemm", metavar="FOLDER", help="where the package deep_gemm is")
    ap.add_argument("--only", metavar="PART", default="", help="only lines whose name contains it")
    o = ap.parse_args()
    names = names_of(*[FlashMLA] * bool(o.flash_mla), *[DeepGEMM] * bool(o.deep_gemm))
    if not any(o.only in n for n in names):
        ap.error("--only '%s': must be part of a line's name: %s" % (o.only, "; ".join(names)))
    if not torch:
        print("peers: no torch here: skipped")
        return 77
    if not torch.cuda.is_available():
        print("peers: no CUDA device: skipped")
        return 77
    p = torch.cuda.get_device_properties(0)
    print(f"peers: {p.name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    torch.manual_seed(1)
    ONLY = o.only
    if o.flash_mla:
        library("FlashMLA", lambda: FlashMLA(o.flash_mla))
    if o.deep_gemm:
        library("DeepGEMM", lambda: DeepGEMM(o.deep_gemm))
    torch_rows()
    for name in FAILED:
        print(f"peers: {name}: FAILED")
    if not N_TIMED:
        print("peers: nothing was timed: FAILED")
    return 1 if FAILED or not N_TIMED else 0


if __name__ == "__main__":
    sys.exit(main())
