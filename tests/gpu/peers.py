#!/usr/bin/env python3
"""What PyTorch and its libraries need on this card for the work of our kernels, at the shapes of
tests/gpu/bench_*.c: to be read beside those lines. Needs torch with CUDA; without it says so, exit 77.

Time: median of five rounds, each the mean of calls enqueued between two events; buffers taken in turn where
one set fits the second-level cache. Data: random. A peer that this version of torch has not is one line.
"""
import sys

try:
    import torch
except ImportError:
    print("peers: no torch here")
    sys.exit(77)
if not torch.cuda.is_available():
    print("peers: no CUDA device")
    sys.exit(77)

DEV, BF16 = "cuda", torch.bfloat16
L2 = 64 << 20


def turns(nbytes):
    return max(1, min(16, -(-L2 // int(nbytes))))


def timed(call, n_sets, budget_ms=60.0):
    """Microseconds of call(i), i counting up modulo n_sets."""
    for i in range(n_sets + 1):
        call(i % n_sets)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    n, rounds = 4, []
    while len(rounds) < 6:
        begin.record()
        for i in range(n):
            call(i % n_sets)
        end.record()
        torch.cuda.synchronize()
        ms = begin.elapsed_time(end)
        rounds.append(1000 * ms / n)
        if len(rounds) == 1:  # the first round only chooses how many calls a round has
            n = max(4, min(200, int(budget_ms / 5 / max(ms / n, 1e-3))))
    return sorted(rounds[1:])[2]


def line(name, shape, us, flops=0.0, nbytes=0.0):
    rate = f"{flops / us / 1e6:8.0f} TFLOP/s" if flops else f"{nbytes / us / 1e6:8.2f} TB/s   "
    print(f"{name:34} {shape:30} {us:10.1f} us {rate}", flush=True)


def peer(name, shape, run):
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


def main():
    p = torch.cuda.get_device_properties(0)
    print(f"peers: {p.name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    torch.manual_seed(1)
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
