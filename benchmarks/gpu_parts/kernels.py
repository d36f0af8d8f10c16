"""Every kernel in bfloat16 against float64, on memory that was full of NaN. On a CPU torch stands in for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gpu_parts.part import Row, Setting
from weft.config.decoder import AttentionSpec, DecoderSpec, LayerSpec, QkNorm, RopeConfig
from weft.config.engine import EngineConfig
from weft.config.gpu import FP8_CAPABILITY
from weft.config.model import ModelConfig
from weft.executor.backend import AttentionBatch
from weft.executor.gpu.build import GpuKernels, gpu_kernels
from weft.executor.gpu.cuda import Cuda
from weft.executor.kv_pool import KVPool
from weft.executor.plain.attention import TorchPaged
from weft.models.layers.attention import Heads
from weft.models.layers.rope import Rope
from weft.ops.attention import paged_attention
from weft.ops.elementwise import apply_rotary, rms_norm, rotary_tables
from weft.ops.plain import PlainOps
from weft.ops.protocol import Norm
from weft.ops.sampling import TorchSamplerOps, UploadedSampling

ROPE = RopeConfig(theta=1e6)
NORMED = AttentionSpec(rope=ROPE, qk_norm=QkNorm.HEAD)
MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    name="kernels",
    vocab_size=1_000,
    hidden_size=512,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1_536,
    max_position=8_192,
    norm_eps=1e-6,
    dtype="bfloat16",
    decoder=DecoderSpec(layers=(LayerSpec(attention=NORMED),)),
)
BOUNDS = {
    "": 1e-2,
    "int8": 3e-2,
    "fp8": 6e-2,
}  # of products, by what weights and activations are rounded to
BOUND = 1e-2  # root mean square of the error, as part of that of the values: bfloat16 has 8 bits


def findings(setting: Setting) -> Iterator[Row]:
    torch.manual_seed(0)
    with stream(setting):
        for format in BOUNDS:
            if (
                format != "fp8"
                or not setting.on_gpu
                or torch.cuda.get_device_capability() >= FP8_CAPABILITY
            ):
                yield from products(setting, format)
        yield from attention(setting)
        yield from choices(setting)


@lru_cache
def cuda() -> Cuda:
    return Cuda()


def stream(setting: Setting) -> AbstractContextManager[object]:
    """The one on which a runner's steps are computed."""
    return cuda().stream() if setting.on_gpu else nullcontext()


def parts(
    setting: Setting,
    model: ModelConfig,
    num_slots: int,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
):
    """The functions that compute, and the KV pool: our kernels on a GPU, torch on a CPU."""
    device = torch.device(setting.device)
    pool = KVPool(model, num_slots, device, dtype)
    if not setting.on_gpu:
        ops = PlainOps(getattr(torch, model.dtype), device, model.quantize)
        return GpuKernels(ops, TorchPaged(model, pool), TorchSamplerOps()), pool
    engine = EngineConfig(device=setting.device, attention_backend=backend)
    return gpu_kernels(engine, model, pool, model.max_position), pool


def compared(what: str, actual: Tensor, expected: Tensor, bound: float = BOUND) -> Row:
    error = (actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    return {
        "what": what,
        "ok": bool(error < bound) and bool(actual.isfinite().all()),
        "error": float(error),
    }


def poison(device: str) -> None:
    """Fill memory that torch will hand out next with NaN: large pieces, and many small ones."""
    if device == "cuda":
        pieces = [torch.full((1 << 26,), torch.nan, device=device) for _ in range(2)]
        pieces += [torch.full((1 << 16,), torch.nan, device=device) for _ in range(64)]
        del pieces


def products(setting: Setting, format: str) -> Iterator[Row]:
    ops = parts(setting, replace(MODEL, quantize=format), 16)[0].ops
    bound, name = BOUNDS[format], f", {format}" if format else ""
    device, size, inner = setting.device, MODEL.hidden_size, MODEL.intermediate_size
    plain = ops.matrix(size, (size, 256, 256), bias=True)
    gated = ops.matrix(size, (inner, inner), gated=True)
    for matrix, sizes in ((plain, (size, 256, 256)), (gated, (inner, inner))):
        for part, num in enumerate(sizes):
            matrix.put(part, torch.randn(num, size, device=device) * 0.05)
    for part, num in enumerate((size, 256, 256)):
        plain.put_bias(part, torch.randn(num, device=device))
    norm = Norm(torch.rand(size, device=device, dtype=torch.bfloat16) + 0.5, 1e-6)
    whole = torch.cat([plain.get(part) for part in range(3)]).double()
    bias = torch.cat([plain.get_bias(part) for part in range(3)]).double()
    gate, up = gated.get(0).double(), gated.get(1).double()
    for rows in (1, 3, 64, 257):
        x = torch.randn(rows, size, device=device, dtype=torch.bfloat16)
        add = torch.randn(rows, 1024, device=device, dtype=torch.bfloat16)
        normed = rms_norm(x.double(), norm.weight.double(), 1e-6)
        poison(device)
        yield compared(f"norm, {rows} rows", ops.computed(ops.norm(x.clone(), norm)), normed)
        poison(device)
        total = add.clone() + ops.linear(ops.norm(x.clone(), norm), plain)
        actual = ops.computed(total)
        expected = normed @ whole.t() + bias + add.double()
        yield compared(f"norm, product, bias, sum, {rows} rows{name}", actual, expected, bound)
        poison(device)
        expected = torch.nn.functional.silu(normed @ gate.t()) * (normed @ up.t())
        yield compared(
            f"gated product, {rows} rows{name}",
            ops.computed(ops.gated(ops.norm(x.clone(), norm), gated)),
            expected,
            bound,
        )


UNNORMED = DecoderSpec(layers=(LayerSpec(attention=AttentionSpec(rope=ROPE)),))
SLIDING = DecoderSpec(layers=(LayerSpec(attention=replace(NORMED, window=40)),))
MODELS = {
    "": MODEL,
    ", heads of 128": replace(MODEL, num_heads=16, num_kv_heads=8, head_dim=128),
    ", one KV head": replace(MODEL, num_heads=6, num_kv_heads=1, decoder=UNNORMED),
    ", window": replace(MODEL, decoder=SLIDING),
}
STEPS = {  # starts and lens of the requests of a step
    "decode": ([0, 1, 17, 300, 1_000], [1, 1, 1, 1, 1]),
    "long decode": ([5_000], [1]),
    "decode of many": (list(range(40, 104)), [1] * 64),
    "prompts": ([0, 0, 0], [5, 64, 300]),
    "chunks": ([64, 700], [100, 33]),
    "mixed": ([0, 33, 900, 12], [70, 1, 1, 2]),
}


def attention(setting: Setting) -> Iterator[Row]:
    """Norm and rotation of queries and keys, storing, attention; random tables of slots."""
    for kind, model in setting.pick(list(MODELS.items()), list(MODELS.items())[:2]):
        for name, (starts, lens) in STEPS.items():
            yield from one_step(
                setting,
                f"{name}{kind}",
                model,
                np.array(starts, np.int32),
                np.array(lens, np.int32),
            )
    if setting.on_gpu:
        fp8 = replace(MODEL, kv_dtype="float8_e4m3fn")
        for name in ("decode", "mixed"):
            starts, lens = (np.array(numbers, np.int32) for numbers in STEPS[name])
            yield from one_step(setting, f"{name}, KV fp8", fp8, starts, lens, torch.float8_e4m3fn)


def one_step(
    setting: Setting,
    name: str,
    model: ModelConfig,
    starts,
    lens,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Iterator[Row]:
    device, num = setting.device, len(lens)
    stops = starts + lens
    found, pool = parts(setting, model, int(stops.sum()) + 50, dtype, backend)
    slots_of = np.random.default_rng(0).permutation(pool.num_slots)[: stops.sum()].astype(np.int32)
    table = np.full((num + 3, int(stops.max()) + 7), -1, np.int32)
    rows = np.random.default_rng(1).permutation(num + 3)[:num].astype(np.int32)
    for row, part in zip(rows, np.split(slots_of, np.cumsum(stops)[:-1]), strict=True):
        table[row, : len(part)] = part
    slots = np.concatenate(
        [table[row, start:stop] for row, start, stop in zip(rows, starts, stops, strict=True)]
    )
    positions = np.concatenate(
        [np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
    )
    for cache in (*pool.k, *pool.v):
        cache.copy_(torch.randn(cache.shape, device=device).to(dtype))
    there = [torch.from_numpy(x.astype(np.int64)).to(device) for x in (positions, slots)]
    batch = AttentionBatch(rows, starts, lens, *there, torch.from_numpy(table).to(device))
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    qkv = torch.randn(len(slots), width, device=device, dtype=torch.bfloat16)
    weights = [torch.rand(model.head_dim, device=device, dtype=torch.bfloat16) + 0.5 for _ in "qk"]
    is_normed = model.decoder.layer(0).attention.qk_norm is QkNorm.HEAD
    norms = [Norm(weight, 1e-6) if is_normed else None for weight in weights]
    rope = Rope(ROPE, model)
    q, k, v = (
        qkv.double()
        .view(len(slots), -1, model.head_dim)
        .split([model.num_heads, *[model.num_kv_heads] * 2], 1)
    )
    if is_normed:
        q, k = (
            rms_norm(x, weight.double(), 1e-6) for x, weight in zip((q, k), weights, strict=True)
        )
    rotation = rotary_tables(*(x.double() for x in rope.at(there[0])), torch.float64)
    q, k = apply_rotary(q, *rotation), apply_rotary(k, *rotation)
    found.attention.prepare(batch)
    poison(device)
    actual = found.attention.forward(qkv.clone(), Heads(rope, *norms), 0)
    bound = 0.05 if dtype == torch.float8_e4m3fn else BOUND
    yield compared(f"K of {name}", pool.k[0][there[1]].float(), k, bound)
    yield compared(f"V of {name}", pool.v[0][there[1]].float(), v, bound)
    cached = (pool.k[0].float().double().cpu(), pool.v[0].float().double().cpu())
    numbers = (torch.from_numpy(x) for x in (rows, starts, lens))
    expected = paged_attention(
        q.cpu(), *cached, torch.from_numpy(table), *numbers, model.window(0), model.head_dim**-0.5
    )
    yield compared(f"attention of {name}", actual.cpu(), expected.flatten(1))


def choices(setting: Setting) -> Iterator[Row]:
    """Tokens against the specification, which computes on the CPU."""
    sampler, spec = parts(setting, MODEL, 16)[0].sampler, TorchSamplerOps()
    vocab_size = setting.pick(151_936, 3_000)
    for num in (1, 7, 64):
        logits = torch.randn(num, vocab_size) * 3
        rows = np.arange(num)
        for name, (temperature, top_k, top_p, min_p) in {
            "greedy": (0.0, 0, 1.0, 0.0),
            "drawn": (0.8, 0, 1.0, 0.0),
            "top-k": (1.0, 20, 1.0, 0.0),
            "top-p": (1.0, 0, 0.9, 0.0),
            "all": (0.6, 50, 0.95, 0.02),
        }.items():
            draws = UploadedSampling(
                *(np.full(num, temperature, np.float32), np.full(num, top_k, np.int32)),
                *(np.full(num, top_p, np.float32), np.full(num, min_p, np.float32)),
                *(rows.astype(np.int64) * 7, rows.astype(np.int32) + 3),
                None,  # type: ignore[arg-type]
            )
            plain = Plain(draws)
            poison(setting.device)
            actual = sampler.tokens(logits.to(setting.device), plain).tokens.cpu()
            same = float((actual == spec.tokens(logits.clone(), plain).tokens).float().mean())
            # the logarithms of two devices differ in the last bit, which decides between two tokens now and then
            yield {"what": f"{name}, {num} rows: same token", "ok": same > 0.95, "part": same}
    yield from masked(setting, lambda: torch.randn(5, vocab_size), sampler, spec)


def masked(setting: Setting, make: Callable[[], Tensor], sampler, spec) -> Iterator[Row]:
    logits = make()
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (2, logits.shape[1] // 32), dtype=torch.int32)
    rows = torch.tensor([3, 1])
    expected = logits.clone()
    spec.mask(expected, words, rows)
    actual = logits.to(setting.device)
    sampler.mask(actual, words.to(setting.device), rows.to(setting.device))
    yield {"what": "mask", "ok": bool(torch.equal(actual.cpu(), expected))}


class Plain:
    """Draws that no device has been told."""

    def __init__(self, draws: UploadedSampling) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions"):
            setattr(self, name, getattr(draws, name))
