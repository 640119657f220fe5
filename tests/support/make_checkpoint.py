#!/usr/bin/env python3
"""Writes a checkpoint with random weights: any shape, every stored form the loader reads.

    make_checkpoint.py OUT_DIR [--preset tiny|bench|flash] [--layers N] [--form FORM] [--shards N] [--seed N] [--fast]
                       [--config hf|hf-new|released] [--set hidden_size=256 compress_ratios=[0,4,128,0] ...]

Only the standard library is used, and each tensor is generated while it is written, so that gigabytes take
seconds. Codes are drawn from tables of normal quantiles: weights are roughly normal, and products of realistic
size. The same seed and shape give the same values under native and Hugging Face names.
A folder that holds another checkpoint's files is refused unless all of them are written anew. What is needed is
asked of the file system first, and an error leaves none of the files behind.
--fast draws 64 MB of random bytes once, of which each tensor is a stretch from a place of its own, and writes the
shards side by side: more than a gigabyte a second. Preset flash is always made so.

Forms
    bf16            plain: BF16, float32 where the release has it; also f32, f16
    native          the released form: fp8 blocks with ue8m0 scales, fp4 experts
    f32scale        native, but the fp8 blocks have float32 scales that are no powers of two
    base            fp8 experts with float32 scales, as in the -Base releases
    nvfp4           NVFP4 experts with input_scale; nvfp4-noinput without
    hf-bf16         Hugging Face names, stacked experts, no quantisation, no MTP
    hf-native       Hugging Face names, fp8 with weight_scale_inv, stacked fp4 experts, no MTP
    hf-base         the same with stacked fp8 experts (moe_intermediate_size a multiple of 128)
"""
import argparse
import json
import math
import os
import random
import re
import statistics
import struct
import sys
import time
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

FORMS = ("bf16", "f32", "f16", "native", "f32scale", "base", "nvfp4", "nvfp4-noinput", "hf-bf16", "hf-native", "hf-base")
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1}

TINY = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "attention_bias": False, "bos_token_id": 0,
    "eos_token_id": 1, "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hidden_act": "silu", "n_shared_experts": 1,
    "norm_topk_prob": True, "num_key_value_heads": 1, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
    "scoring_func": "sqrtsoftplus", "tie_word_embeddings": False, "topk_method": "noaux_tc",
    "max_position_embeddings": 1048576, "rope_theta": 10000, "compress_rope_theta": 160000, "index_head_dim": 128,
    "sliding_window": 128, "vocab_size": 512, "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 2, "head_dim": 256, "q_lora_rank": 256, "o_groups": 2, "o_lora_rank": 128, "index_n_heads": 8,
    "index_topk": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "num_hash_layers": 1,
    "num_nextn_predict_layers": 1, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "compress_ratios": [0, 4, 128, 0],
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536,
                     "type": "yarn"},
}
PRESETS = {
    "tiny": {},
    # Layers of the released width; 2.5 GB in native form, far beyond any cache.
    "bench": {"vocab_size": 16384, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 6,
              "num_attention_heads": 64, "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
              "index_n_heads": 64, "index_topk": 512, "n_routed_experts": 16, "num_experts_per_tok": 6,
              "num_nextn_predict_layers": 0, "compress_ratios": [0, 4, 128, 4, 128, 4]},
    # The released model, of as many layers as --layers says: 3.6 GB each, and 2.1 GB of embedding and head.
    "flash": {"vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 6,
              "num_attention_heads": 64, "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
              "index_n_heads": 64, "index_topk": 512, "n_routed_experts": 256, "num_experts_per_tok": 6,
              "num_hash_layers": 3, "num_nextn_predict_layers": 0},
}
# Whole numbers as common/text/config.c has them; others from 0. Floats: the loader's ranges are narrower.
RANGES = {"hidden_size": (1, 65536), "vocab_size": (2, 1 << 24), "num_hidden_layers": (1, 256),
          "num_nextn_predict_layers": (0, 16), "num_attention_heads": (1, 4096), "head_dim": (2, 4096),
          "qk_rope_head_dim": (2, 4096), "q_lora_rank": (1, 65536), "o_groups": (1, 4096), "o_lora_rank": (1, 65536),
          "sliding_window": (1, 65536), "index_n_heads": (1, 1024), "index_head_dim": (32, 1024), "index_topk": (1, 4096),
          "n_routed_experts": (1, 4096), "num_experts_per_tok": (1, 64), "moe_intermediate_size": (1, 65536),
          "hc_mult": (1, 8), "hc_sinkhorn_iters": (1, 1000), "max_position_embeddings": (1, 1 << 30),
          "num_hash_layers": (0, 65536)}
# What sides of an expert's matrices must be multiples of. Codes of fp4 share a scale by 32 along a row, of nvfp4 by 16.
# A block of fp8 may be cut by a matrix's end, but hf-base stacks w1 on w3: w1's rows must end with a block there, and
# those are moe_intermediate_size; hidden_size is no side that is stacked.
SIDES = ("hidden_size", "moe_intermediate_size")
BLOCK = {"native": (32, SIDES), "f32scale": (32, SIDES), "hf-native": (32, SIDES), "nvfp4": (16, SIDES),
         "nvfp4-noinput": (16, SIDES), "hf-base": (128, SIDES[1:])}
OWN_FILES = re.compile(r"config\.json|model\.safetensors(\.index\.json)?|model-\d{5}-of-\d{5}\.safetensors")
QUANTIZATION = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128]}


# ------------------------------------------------------------------ numbers and their codes
def bf16_bits(x):
    """Nearest even; finite x."""
    u = struct.unpack("<I", struct.pack("<f", x))[0]
    return (u + 0x7FFF + (u >> 16 & 1)) >> 16


def e4m3_value(code):
    e, m = code >> 3 & 15, code & 7
    v = m * 2.0 ** -9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    return -v if code & 128 else v


def e4m3_code(x):
    """Nearest code by search; never the NaN codes."""
    code = min(range(127), key=lambda c: (abs(e4m3_value(c) - abs(x)), c & 1))
    return code | (128 if x < 0 else 0)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e2m1_code(x):
    code = min(range(8), key=lambda c: (abs(E2M1[c] - abs(x)), c & 1))
    return code | (8 if x < 0 else 0)


QUANTILE = [statistics.NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)]
QUANTILE16 = [statistics.NormalDist().inv_cdf((i + 0.5) / 16) for i in range(16)]
FP8_SIGMA, FP4_SIGMA = 120.0, 2.4       # of the codes' values, before the scale
FP8_TABLE = bytes(e4m3_code(q * FP8_SIGMA) for q in QUANTILE)
FP4_NIBBLE = [e2m1_code(q * FP4_SIGMA) for q in QUANTILE16]
FP4_TABLE = bytes(FP4_NIBBLE[b & 15] | FP4_NIBBLE[b >> 4] << 4 for b in range(256))
CHUNK = 4 << 20
FAST_BYTES = 64 << 20


def random_bytes(rng, n):
    while n > 0:
        k = min(n, CHUNK)
        yield rng.randbytes(k)
        n -= k


class Blocks:
    """Random bytes drawn once, and what tables made of them; None in place of one: each tensor draws its own."""

    def __init__(self, seed):
        self.raw, self.made = random.Random(seed).randbytes(FAST_BYTES), {}

    def prepare(self, table, size):
        """table applied to the top byte of each value of that size."""
        key = (table, size)
        if key not in self.made:
            b = bytearray(self.raw)
            b[size - 1::size] = b[size - 1::size].translate(table)
            self.made[key] = memoryview(bytes(b))
        return self.made[key]


def stretch(block, rng, n):
    at = rng.randrange(FAST_BYTES // 4096) * 4096
    while n > 0:
        k = min(n, FAST_BYTES - at)
        yield block[at:at + k]
        n, at = n - k, 0


# ------------------------------------------------------------------ generators: (rng) -> chunks of bytes
def normal_wide(sigma, n, size, blocks=None):
    """n values of BF16 (size 2) or F32 (size 4): the top byte by quantile, the rest random."""
    top = bytes(bf16_bits(q * sigma) >> 8 for q in QUANTILE)
    if blocks:
        block = blocks.prepare(top, size)
        return lambda rng: stretch(block, rng, n * size)

    def gen(rng):
        for raw in random_bytes(rng, n * size):
            b = bytearray(raw)
            b[size - 1::size] = b[size - 1::size].translate(top)
            yield bytes(b)
    return gen


def normal_f16(sigma, n):
    def gen(rng):
        for at in range(0, n, 65536):
            k = min(65536, n - at)
            yield struct.pack("<%de" % k, *(rng.gauss(0, sigma) for _ in range(k)))
    return gen


def exact(values, dtype):
    """A short list of floats, in full precision."""
    def gen(rng):
        v = values(rng) if callable(values) else values
        if dtype == "BF16":
            yield b"".join(struct.pack("<H", bf16_bits(x)) for x in v)
        else:
            yield struct.pack("<%d%s" % (len(v), "e" if dtype == "F16" else "f"), *v)
    return gen


def codes(n, table, blocks=None):
    if blocks:
        block = blocks.prepare(table, 1)
        return lambda rng: stretch(block, rng, n)

    def gen(rng):
        for raw in random_bytes(rng, n):
            yield raw.translate(table)
    return gen


def choice_table(rng, rows, k, n_experts, repeat=False):
    part = b""
    for at in range(0, rows, 4096):
        n = min(4096, rows - at)
        if not (repeat and part):
            part = b"".join(struct.pack("<%dq" % k, *rng.sample(range(n_experts), k)) for _ in range(n))
        yield part[:n * 8 * k]


# ------------------------------------------------------------------ the model's tensors, native names
class Builder:
    def __init__(self, cfg, form, blocks=None):
        self.c, self.form, self.out, self.blocks = cfg, form, [], blocks
        self.hf = form.startswith("hf-")
        self.kind = form[3:] if self.hf else form
        self.wide = {"f32": "F32", "f16": "F16"}.get(self.kind, "BF16")
        self.fp8 = self.kind not in ("bf16", "f32", "f16")

    def add(self, name, dtype, shape, gen):
        self.out.append((name, dtype, tuple(shape), gen))

    def normal(self, name, dtype, shape, sigma):
        n = math.prod(shape)
        gen = normal_f16(sigma, n) if dtype == "F16" else normal_wide(sigma, n, BYTES[dtype], self.blocks)
        self.add(name, dtype, shape, gen)

    def plain(self, name, o, i, gain=1.0):
        self.normal(name + ".weight", self.wide, (o, i), gain * i ** -0.5)

    def norm(self, name, d):
        self.add(name + ".weight", self.wide, (d,),
                 exact(lambda rng: [rng.gauss(1, 0.1) for _ in range(d)], self.wide))

    def small(self, name, shape, mean, sigma):
        n = math.prod(shape)
        self.add(name, "F32", shape, exact(lambda rng: [rng.gauss(mean, sigma) for _ in range(n)], "F32"))

    def e8m0(self, name, shape, sigma_per_code):
        """Exponents round the wanted scale, one binade up or down."""
        k = round(math.log2(sigma_per_code)) + 127
        self.add(name, "F8_E8M0", shape,
                 codes(math.prod(shape), bytes(k - 1 + b % 3 for b in range(256)), self.blocks))

    def f32_scales(self, name, shape, sigma_per_code):
        n = math.prod(shape)
        self.add(name, "F32", shape,
                 exact(lambda rng: [sigma_per_code * rng.uniform(0.6, 1.4) for _ in range(n)], "F32"))

    def dense8(self, name, o, i, gain=1.0):
        if not self.fp8:
            return self.plain(name, o, i, gain)
        self.add(name + ".weight", "F8_E4M3", (o, i), codes(o * i, FP8_TABLE, self.blocks))
        blocks = (-(-o // 128), -(-i // 128))
        f = self.f32_scales if self.kind in ("f32scale", "base") else self.e8m0
        f(name + ".scale", blocks, gain * i ** -0.5 / FP8_SIGMA)

    def expert(self, name, o, i, gain=1.0):
        if not self.fp8:
            return self.plain(name, o, i, gain)
        if self.kind == "base":
            return self.dense8(name, o, i, gain)
        nv = self.kind.startswith("nvfp4")
        self.add(name + ".weight", "U8" if nv else "I8", (o, i // 2), codes(o * i // 2, FP4_TABLE, self.blocks))
        want = gain * i ** -0.5 / FP4_SIGMA
        if not nv:
            return self.e8m0(name + ".scale", (o, i // 32), want)
        self.add(name + ".weight_scale", "F8_E4M3", (o, i // 16),     # 0.5 .. 1.9 round 1
                 codes(o * i // 16, bytes(0x30 + b % 16 for b in range(256)), self.blocks))
        self.add(name + ".weight_scale_2", "F32", (), exact([want], "F32"))
        if self.kind == "nvfp4":
            self.add(name + ".input_scale", "F32", (), exact([6.0 / (6.0 * 448.0)], "F32"))

    def hyper(self, name, rows):
        d = self.c["hc_mult"] * self.c["hidden_size"]
        self.normal(name + "_fn", "F32", (rows, d), d ** -0.5)
        self.small(name + "_base", (rows,), 0, 0.4)
        self.small(name + "_scale", (3 if rows > self.c["hc_mult"] else 1,), 0.8, 0.2)

    def compressor(self, name, ratio, e):
        w = e * (2 if ratio == 4 else 1)
        self.small(name + ".ape", (ratio, w), 0, 0.5)
        self.plain(name + ".wkv", w, self.c["hidden_size"])
        self.plain(name + ".wgate", w, self.c["hidden_size"], 1.5)
        self.norm(name + ".norm", e)

    def block(self, p, ratio, hashed):
        c = self.c
        D, H, d, inter = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["moe_intermediate_size"]
        E, k, mix = c["n_routed_experts"], c["num_experts_per_tok"], (2 + c["hc_mult"]) * c["hc_mult"]
        a, f = p + ".attn", p + ".ffn"
        self.small(a + ".attn_sink", (H,), 0, 1)
        self.dense8(a + ".wq_a", c["q_lora_rank"], D)
        self.norm(a + ".q_norm", c["q_lora_rank"])
        self.dense8(a + ".wq_b", H * d, c["q_lora_rank"])
        self.dense8(a + ".wkv", d, D)
        self.norm(a + ".kv_norm", d)
        self.dense8(a + ".wo_a", c["o_groups"] * c["o_lora_rank"], H * d // c["o_groups"], 2.0)
        self.dense8(a + ".wo_b", D, c["o_groups"] * c["o_lora_rank"], 1.5)
        if ratio:
            self.compressor(a + ".compressor", ratio, d)
        if ratio == 4:
            self.dense8(a + ".indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])
            self.plain(a + ".indexer.weights_proj", c["index_n_heads"], D)
            self.compressor(a + ".indexer.compressor", 4, c["index_head_dim"])
        self.norm(p + ".attn_norm", D)
        self.norm(p + ".ffn_norm", D)
        self.hyper(p + ".hc_attn", mix)
        self.hyper(p + ".hc_ffn", mix)
        self.plain(f + ".gate", E, D, 1.5)
        if hashed:
            self.add(f + ".gate.tid2eid", "I64", (c["vocab_size"], k),
                     lambda rng: choice_table(rng, c["vocab_size"], k, E, bool(self.blocks)))
        else:
            self.small(f + ".gate.bias", (E,), 0, 0.02 if self.blocks else 0.3)     # fast: nearly uniform
        for name in ["experts.%d" % e for e in range(E)] + ["shared_experts"]:
            one = self.expert if name != "shared_experts" else self.dense8
            one("%s.%s.w1" % (f, name), inter, D, 1.5)
            one("%s.%s.w2" % (f, name), D, inter, 0.25)
            one("%s.%s.w3" % (f, name), inter, D, 1.5)

    def build(self):
        c = self.c
        D, V, hc, n = c["hidden_size"], c["vocab_size"], c["hc_mult"], c["num_hidden_layers"]
        self.normal("embed.weight", self.wide, (V, D), 1.0)
        for i in range(n):
            self.block("layers.%d" % i, c["compress_ratios"][i], i < c["num_hash_layers"])
        for k in range(0 if self.hf else c["num_nextn_predict_layers"]):
            p = "mtp.%d" % k
            ratios = c["compress_ratios"]
            self.block(p, ratios[n + k] if n + k < len(ratios) else 0, False)
            self.dense8(p + ".e_proj", D, D)
            self.dense8(p + ".h_proj", D, D)
            for z in ("enorm", "hnorm", "norm"):
                self.norm("%s.%s" % (p, z), D)
            self.hyper(p + ".hc_head", hc)
        self.norm("norm", D)
        self.normal("head.weight", self.wide, (V, D), 2.5 * D ** -0.5)
        self.hyper("hc_head", hc)
        return self.out


# ------------------------------------------------------------------ Hugging Face names
HF_PARTS = [("attn_norm.", "input_layernorm."), ("ffn_norm.", "post_attention_layernorm."), ("hc_attn_", "attn_hc."),
            ("hc_ffn_", "ffn_hc."), ("attn.attn_sink", "self_attn.sinks"),
            ("attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"),
            ("attn.indexer.compressor.wkv.", "self_attn.compressor.indexer.kv_proj."),
            ("attn.indexer.compressor.wgate.", "self_attn.compressor.indexer.gate_proj."),
            ("attn.indexer.compressor.norm.", "self_attn.compressor.indexer.kv_norm."),
            ("attn.indexer.wq_b.", "self_attn.compressor.indexer.q_b_proj."),
            ("attn.indexer.weights_proj.", "self_attn.compressor.indexer.scorer.weights_proj."),
            ("attn.compressor.ape", "self_attn.compressor.position_bias"),
            ("attn.compressor.wkv.", "self_attn.compressor.kv_proj."),
            ("attn.compressor.wgate.", "self_attn.compressor.gate_proj."),
            ("attn.compressor.norm.", "self_attn.compressor.kv_norm."), ("attn.wq_a.", "self_attn.q_a_proj."),
            ("attn.wq_b.", "self_attn.q_b_proj."), ("attn.wkv.", "self_attn.kv_proj."),
            ("attn.wo_a.", "self_attn.o_a_proj."), ("attn.wo_b.", "self_attn.o_b_proj."),
            ("attn.q_norm.", "self_attn.q_a_norm."), ("attn.kv_norm.", "self_attn.kv_norm."),
            ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"), ("ffn.gate.", "mlp.gate."),
            ("ffn.shared_experts.w1.", "mlp.shared_experts.gate_proj."),
            ("ffn.shared_experts.w2.", "mlp.shared_experts.down_proj."),
            ("ffn.shared_experts.w3.", "mlp.shared_experts.up_proj.")]
HF_TOP = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight", "norm.weight": "model.norm.weight"}


def hf_name(name):
    if name in HF_TOP:
        return HF_TOP[name]
    if name.startswith("hc_head_"):
        return "model.hc_head.hc_" + name[8:]
    layers, i, rest = name.split(".", 2)
    for a, b in HF_PARTS:
        if rest.startswith(a):
            rest = b + rest[len(a):]
            break
    if name.endswith(".scale"):         # of an fp8 matrix; hc_attn_scale keeps its name
        rest = rest[:-6] + ".weight_scale_inv"
    return "model.%s.%s.%s" % (layers, i, rest)


def to_hf(tensors, cfg):
    """Renames, and stacks the routed experts: gate_up_proj [E, 2 inter, D] and down_proj, with their scales."""
    out, by_name = [], {t[0]: t for t in tensors}
    experts = set()
    for name, dtype, shape, _ in tensors:
        if ".ffn.experts." not in name:
            out.append((hf_name(name), dtype, shape, [name]))
        else:
            experts.add(name.split(".ffn.experts.")[0])
    E = cfg["n_routed_experts"]
    for p in sorted(experts):
        for part, ending in (("weight", ""), ("scale", "_scale_inv")):
            for stack, members in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
                names = ["%s.ffn.experts.%d.%s.%s" % (p, e, m, part) for e in range(E) for m in members]
                if names[0] in by_name:
                    _, dtype, shape, _ = by_name[names[0]]
                    out.append(("model.%s.mlp.experts.%s%s" % (p, stack, ending), dtype,
                                (E, shape[0] * len(members), shape[1]), names))
    return out, by_name


# ------------------------------------------------------------------ files
def config_of(cfg, form, style):
    c = json.loads(json.dumps(cfg))
    kind = form[3:] if form.startswith("hf-") else form
    if kind not in ("bf16", "f32", "f16"):
        c["quantization_config"] = dict(QUANTIZATION)
        if kind in ("f32scale", "base"):
            del c["quantization_config"]["scale_fmt"]
        if kind != "base":
            c["expert_dtype"] = "fp4"
        if kind.startswith("nvfp4"):
            c["quantization_config"]["moe_quant_algo"] = "NVFP4"
    if style == "hf-new":
        kinds = {0: "sliding_attention", 4: "compressed_sparse_attention"}
        ratios = c.pop("compress_ratios")[:c["num_hidden_layers"]]
        dense = {r for r in ratios if r not in kinds}
        if len(dense) > 1:
            sys.exit("--config hf-new: only one dense ratio can be written, not %s" % sorted(dense))
        c["layer_types"] = [kinds.get(r, "heavily_compressed_attention") for r in ratios]
        c["compress_rates"] = {"compressed_sparse_attention": 4, "heavily_compressed_attention": max(dense or {128})}
        c["mlp_layer_types"] = ["hash_moe" if i < c["num_hash_layers"] else "moe" for i in range(c["num_hidden_layers"])]
        yarn, partial = c.pop("rope_scaling", None), c["qk_rope_head_dim"] / c["head_dim"]
        del c["num_hash_layers"], c["qk_rope_head_dim"]
        comp = {"rope_type": "default"}
        if yarn:
            comp = {("rope_type" if k == "type" else k): v for k, v in yarn.items()}
        c["rope_parameters"] = {
            "main": {"rope_type": "default", "rope_theta": c.pop("rope_theta"), "partial_rotary_factor": partial},
            "compress": dict(comp, rope_theta=c.pop("compress_rope_theta"), partial_rotary_factor=partial)}
    elif style == "released":
        names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_nextn_predict_layers": "n_mtp_layers",
                 "num_attention_heads": "n_heads", "qk_rope_head_dim": "rope_head_dim", "sliding_window": "window_size",
                 "num_experts_per_tok": "n_activated_experts", "moe_intermediate_size": "moe_inter_dim",
                 "num_hash_layers": "n_hash_layers", "scoring_func": "score_func", "routed_scaling_factor": "route_scale",
                 "rms_norm_eps": "norm_eps", "max_position_embeddings": "max_seq_len"}
        keep = {"vocab_size", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "compress_ratios", "index_n_heads",
                "index_head_dim", "index_topk", "n_routed_experts", "n_shared_experts", "hc_mult", "hc_sinkhorn_iters",
                "hc_eps", "swiglu_limit", "rope_theta", "compress_rope_theta"}
        r = {names.get(k, k): v for k, v in c.items() if k in names or k in keep}
        y = c.get("rope_scaling") or {}
        r.update(original_seq_len=y.get("original_max_position_embeddings", 0), rope_factor=y.get("factor", 1),
                 beta_fast=y.get("beta_fast", 32), beta_slow=y.get("beta_slow", 1))
        r["dtype"] = "fp8" if "quantization_config" in c else "bf16"
        if "quantization_config" in c and "scale_fmt" in c["quantization_config"]:
            r["scale_fmt"] = "ue8m0"
        if kind.startswith("nvfp4"):
            r["quantization_config"] = c["quantization_config"]
        if "expert_dtype" in c:
            r["expert_dtype"] = c["expert_dtype"]
        c = r
    return c


def write_file(path, tensors, sources, seed):
    """tensors: (name, dtype, shape, names of the native tensors that are its bytes, in order)."""
    head, at = {}, 0
    for name, dtype, shape, _ in tensors:
        n = math.prod(shape) * BYTES[dtype]
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + n]}
        at += n
    h = json.dumps(head, separators=(",", ":")).encode()
    h += b" " * (-len(h) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(h)) + h)
        for name, dtype, shape, parts in tensors:
            begin = f.tell()
            for p in parts:
                for chunk in sources[p][3](random.Random("%d %s" % (seed, p))):
                    f.write(chunk)
            if f.tell() - begin != math.prod(shape) * BYTES[dtype]:
                raise AssertionError("%s: wrote %d bytes" % (name, f.tell() - begin))
    return at


def open_folder(path, names, total):
    """Makes it, or says why a checkpoint of these files and bytes cannot be written there."""
    old = [n for n in (os.listdir(path) if os.path.isdir(path) else ()) if OWN_FILES.fullmatch(n)]
    others = sorted(set(old) - set(names))
    if others:
        raise ValueError("OUT '%s': has %s of another checkpoint; must be a folder without, or with none but %s"
                         % (path, others[0], ", ".join(names[:2] + ["..."] * (len(names) > 2))))
    new = []  # folders that are not there yet, the innermost first
    at = os.path.abspath(path)
    while not os.path.isdir(at):
        new.append(at)
        at = os.path.dirname(at)
    try:
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as e:
            raise ValueError("OUT '%s': must be a folder to write to, or one that can be made: %s" % (path, e.strerror))
        at = os.statvfs(path)
        free = at.f_bavail * at.f_frsize + sum(os.stat(os.path.join(path, n)).st_blocks * 512 for n in old)
        if total > free:
            raise OSError("%.3f GB are needed, %.3f GB are free" % (total / 1e9, free / 1e9))
    except (OSError, ValueError):
        for at in new:
            if os.path.isdir(at):
                os.rmdir(at)
        raise


def make(path, cfg, form="native", shards=1, seed=1, style="hf", fast=False):
    """cfg: Hugging Face names; returns bytes of tensor data."""
    native = Builder(cfg, form, Blocks(seed) if fast else None).build()
    if form.startswith("hf-"):
        tensors, sources = to_hf(native, cfg)
    else:
        tensors, sources = [(n, d, s, [n]) for n, d, s, _ in native], {t[0]: t for t in native}
    shard = ["model-%05d-of-%05d.safetensors" % (k + 1, shards) for k in range(shards)]
    names = ["config.json"] + (["model.safetensors"] if shards == 1 else ["model.safetensors.index.json"] + shard)
    config = config_of(cfg, form, style)
    open_folder(path, names, sum(math.prod(t[2]) * BYTES[t[1]] for t in tensors))
    try:
        return write_all(path, config, tensors, sources, seed, shard, fast)
    except BaseException:
        for name in names:
            if os.path.exists(os.path.join(path, name)):
                os.remove(os.path.join(path, name))
        raise


def write_all(path, config, tensors, sources, seed, shard, fast):
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(config, f, indent=2)
    # Widest types first, as other writers do: everything is then aligned.
    tensors.sort(key=lambda t: (-BYTES[t[1]], t[0]))
    shards = len(shard)
    if shards == 1:
        return write_file(os.path.join(path, "model.safetensors"), tensors, sources, seed)
    weight_map, files = {}, []
    tensors.sort(key=lambda t: t[0])
    cuts = [len(tensors) * k // shards for k in range(shards + 1)]
    if fast:            # files of one size are done at one time
        ends = list(accumulate(math.prod(t[2]) * BYTES[t[1]] for t in tensors))
        cuts[1:-1] = [bisect_left(ends, ends[-1] * k // shards) for k in range(1, shards)]
    for k in range(shards):
        part = tensors[cuts[k]:cuts[k + 1]]
        part.sort(key=lambda t: (-BYTES[t[1]], t[0]))
        files.append((os.path.join(path, shard[k]), part))
        weight_map.update({t[0]: shard[k] for t in part})
    with ThreadPoolExecutor(max_workers=shards if fast else 1) as pool:
        total = sum(pool.map(lambda f: write_file(*f, sources, seed), files))
    with open(os.path.join(path, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, f, indent=0)
    return total


def setting(text, cfg):
    """FIELD=JSON of --set: a field the presets have, a value of its kind."""
    key, equals, value = text.partition("=")
    if not equals or key not in cfg:
        raise ValueError("'%s': must be FIELD=JSON, FIELD one of %s" % (text, ", ".join(sorted(cfg))))
    try:
        value = json.loads(value)
    except ValueError as e:
        raise ValueError("'%s': not JSON: %s" % (text, e))
    now = cfg[key]
    if isinstance(now, (bool, str)):
        good, want = type(value) is type(now), "true or false" if isinstance(now, bool) else "a string in quotes"
    elif isinstance(now, int):
        least, most = RANGES.get(key, (0, 2 ** 31 - 1))
        good, want = type(value) is int and least <= value <= most, "a whole number, %d to %d" % (least, most)
    elif isinstance(now, float):
        good = type(value) in (int, float) and 0 <= value <= 1e15
        want = "a number, 0 to 1e15"
    elif key == "compress_ratios":
        good = isinstance(value, list) and all(type(v) is int and (v == 0 or 2 <= v <= 1024) for v in value)
        want = "a list of whole numbers, each 0 or 2 to 1024"
    elif isinstance(now, list):
        good, want = isinstance(value, list) and all(type(v) is str for v in value), "a list of strings in quotes"
    else:
        good, want = value is None or isinstance(value, dict), "an object or null"
    if not good:
        raise ValueError("'%s': must be %s" % (text, want))
    return key, value


def check(cfg, form):
    """What no tensor could be made of; the loader says the rest."""
    part, sides = BLOCK.get(form, (1, ()))
    for key in sides:
        if cfg[key] % part:
            raise ValueError("%s is %d; must be a multiple of %d for --form %s" % (key, cfg[key], part, form))
    if cfg["num_attention_heads"] * cfg["head_dim"] % cfg["o_groups"]:
        raise ValueError("o_groups is %d; must divide num_attention_heads * head_dim, %d"
                         % (cfg["o_groups"], cfg["num_attention_heads"] * cfg["head_dim"]))
    if cfg["num_experts_per_tok"] > cfg["n_routed_experts"]:
        raise ValueError("num_experts_per_tok is %d; must be at most n_routed_experts, %d"
                         % (cfg["num_experts_per_tok"], cfg["n_routed_experts"]))
    if len(cfg["compress_ratios"]) < cfg["num_hidden_layers"]:
        raise ValueError("compress_ratios has %d numbers; must be one for each of num_hidden_layers, %d"
                         % (len(cfg["compress_ratios"]), cfg["num_hidden_layers"]))


def count(least, most):
    """A flag's whole number."""
    def parse(text):
        if not re.fullmatch("0|[1-9][0-9]{0,18}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError("'%s' is not right; must be a whole number, %d to %d" % (text, least, most))
        return int(text)
    return parse


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    ap.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    ap.add_argument("--form", choices=FORMS, default="native")
    ap.add_argument("--config", choices=("hf", "hf-new", "released"), default="hf")
    ap.add_argument("--layers", type=count(1, 256), help="of preset flash (6): ratios 0, 0, 4, 128, 4, 128, ...")
    ap.add_argument("--fast", action="store_true", help="one random block, over and over")
    ap.add_argument("--shards", type=count(1, 999), help="default: 1; preset flash: 8")
    ap.add_argument("--seed", type=count(0, 2 ** 63 - 1), default=1)
    ap.add_argument("--set", nargs="*", default=[], metavar="FIELD=JSON")
    a = ap.parse_args()
    cfg = dict(TINY, **PRESETS[a.preset])
    flash = a.preset == "flash"
    if a.layers and not flash:
        ap.error("--layers: of preset flash only")
    if flash:
        n = cfg["num_hidden_layers"] = a.layers or cfg["num_hidden_layers"]
        cfg["compress_ratios"] = ([0, 0] + [4, 128] * n)[:n]
        cfg["num_hash_layers"] = min(3, n)
    try:
        for s in a.set:
            key, value = setting(s, cfg)
            cfg[key] = value
        check(cfg, a.form)
    except ValueError as e:
        ap.error("--set %s" % e)
    begin = time.monotonic()
    try:
        n = make(a.out, cfg, a.form, a.shards or (8 if flash else 1), a.seed, a.config, a.fast or flash)
    except ValueError as e:
        ap.error(str(e))
    except OSError as e:
        sys.exit("make_checkpoint.py: OUT '%s': %s" % (a.out, e.strerror or e))
    took = time.monotonic() - begin
    print("%s: %s, %.1f MB in %.1f s, %.2f GB/s" % (a.out, a.form, n / 1e6, took, n / 1e9 / took))


if __name__ == "__main__":
    main()
