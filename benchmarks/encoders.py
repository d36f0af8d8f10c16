"""Encoders of pictures against transformers: the same random weights, both in turns.

    python benchmarks/encoders.py                   # all families, two threads
    python benchmarks/encoders.py qwen3-vl llava --layers 2 --rounds 5
    python benchmarks/encoders.py --quantize-encoder int12

Each family has the widths of a real model and a few of its layers, which are all alike, and is
asked for one picture again and again. transformers runs with its own fused attention
(`sdpa`) and torch's products. A column says what part of transformers' time is in products
of matrices, and at what part of the speed that torch reaches with a large product here: what lies
within it can be made faster only by a product that is faster than torch's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from weft.config.model import ModelConfig
from weft.executor.cpu.tower import CppTowerBackend
from weft.models.registry import make_model
from weft.models.vision.tower import TowerInput, at_once
from weft.models.vision.towers import make_tower
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import load
from weft.ops.plain import PlainOps
from weft.weights.load import load_weights, unread_of

PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm", "aten::linear", "mkldnn::_linear_pointwise")
FORMATS = {"float32": WeightFormat.F32, "bfloat16": WeightFormat.BF16}
PEAK_SIZE = (1_024, 1_024, 4_096)  # of the product that says what torch can do
TEXT = {
    "vocab_size": 320,
    "hidden_size": 1_024,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}


class Family(NamedTuple):
    """A family as transformers names it, its text, what its configuration and that of its encoder
    have, and the picture: its grid of tokens, or the side of a square."""

    kind: str
    text: dict[str, Any]
    outer: dict[str, Any]
    vision: dict[str, Any]
    grid: tuple[int, int, int] | None = None


def families(layers: int) -> dict[str, Family]:
    of_qwen = {"depth": layers, "out_hidden_size": 1_024}
    deep = {"deepstack_visual_indexes": [0], "num_position_embeddings": 2_304}
    interleaved = {"rope_parameters": {**MROPE, "mrope_interleaved": True}}
    siglip = {"num_hidden_layers": layers, "image_size": 448}
    return {
        "qwen2.5-vl": Family(
            "Qwen2_5_VL",
            {"model_type": "qwen2_5_vl_text", "rope_parameters": MROPE},
            {},
            {
                **of_qwen,
                "hidden_size": 1_280,
                "intermediate_size": 3_420,
                "num_heads": 16,
                "patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [layers - 1],
            },
            (1, 16, 16),
        ),
        "qwen3-vl": Family(
            "Qwen3VL",
            {"model_type": "qwen3_vl_text", **interleaved},
            {},
            {
                **of_qwen,
                **deep,
                "hidden_size": 1_024,
                "intermediate_size": 4_096,
                "num_heads": 16,
                "patch_size": 16,
            },
            (1, 16, 16),
        ),
        "gemma3": Family(
            "Gemma3",
            {"model_type": "gemma3_text"},
            {"mm_tokens_per_image": 64},
            {
                **siglip,
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
                "hidden_size": 1_152,
                "intermediate_size": 4_304,
                "num_attention_heads": 16,
                "patch_size": 14,
            },
        ),
        "smolvlm": Family(
            "SmolVLM",
            {"model_type": "llama"},
            {"scale_factor": 4},
            {
                "num_hidden_layers": layers,
                "image_size": 512,
                "hidden_size": 768,
                "intermediate_size": 3_072,
                "num_attention_heads": 12,
                "patch_size": 16,
            },
        ),
        "llava": Family(
            "Llava",
            {"model_type": "llama"},
            {"image_seq_length": 576, "vision_feature_layer": -1},
            {
                "model_type": "clip_vision_model",
                "num_hidden_layers": layers,
                "image_size": 336,
                "hidden_size": 1_024,
                "intermediate_size": 4_096,
                "num_attention_heads": 16,
                "patch_size": 14,
            },
        ),
    }


class Measured(NamedTuple):
    weft_s: float
    library_s: float
    products_part: float  # of the library's time
    products_flops: float  # a second, while they run
    error: float  # the largest, as a part of the largest number
    cosine: float  # of the vector that is farthest from the library's


def main() -> None:
    parser = argparse.ArgumentParser(description="Encoders against transformers.")
    parser.add_argument("names", nargs="*", help="families; all without any")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=tuple(FORMATS), default="float32")
    parser.add_argument("--quantize-encoder", choices=("none", "int12"), default="none")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    known = families(options.layers)
    dtype = getattr(torch, options.dtype)
    peak = peak_flops(dtype)
    print(f"{options.dtype}, {options.threads} threads; torch's product: {peak / 1e9:.0f} GFLOP/s")
    print(
        "family | weft, ms | transformers, ms | ratio | products, of its time | at | error | cosine"
    )
    for name in options.names or list(known):
        with tempfile.TemporaryDirectory() as folder:
            kept = FORMATS[options.dtype]
            if options.quantize_encoder == "int12":
                kept = WeightFormat.I16
            found = measure(known[name], Path(folder), dtype, kept, options.rounds)
        print(
            f"{name} | {1e3 * found.weft_s:.1f} | {1e3 * found.library_s:.1f} | "
            f"{found.library_s / found.weft_s:.2f} | {found.products_part:.0%} | "
            f"{found.products_flops / peak:.0%} | {found.error:.1e} | {found.cosine:.6f}",
            flush=True,
        )


def peak_flops(dtype: torch.dtype) -> float:
    """What torch reaches with one large product."""
    rows, inner, columns = PEAK_SIZE
    x = torch.randn(rows, inner).to(dtype)
    weight = torch.randn(columns, inner).to(dtype)
    seconds = [timed(lambda: torch.nn.functional.linear(x, weight)) for _ in range(12)]
    return 2 * rows * inner * columns / min(seconds)


@torch.inference_mode()
def measure(
    family: Family, folder: Path, dtype: torch.dtype, kept: WeightFormat, rounds: int
) -> Measured:
    model = made(family, folder, dtype)
    given, call = asked(family, model, dtype)
    config = ModelConfig.from_folder(folder)
    assert config.vision is not None
    tower = make_tower(config.vision, CppTowerBackend(load(), kept))
    decoder = make_model(config, PlainOps(torch.float32, torch.device("cpu")))
    load_weights(chain(decoder.weights(), tower.weights()), folder, unread_of(config))

    def encode() -> Tensor:
        return at_once(tower.encode(given))

    wanted = call().float()
    found = encode().float()[:, : wanted.shape[-1]]
    error = float((found - wanted).abs().max() / wanted.abs().max())
    cosine = float(torch.cosine_similarity(found, wanted).min())
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        ours.append(timed(encode))
        theirs.append(timed(call))
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiled:
        call()
    averages = profiled.key_averages()
    whole_us = sum(one.self_cpu_time_total for one in averages)
    products = [one for one in averages if one.key in PRODUCTS]
    products_us = sum(one.self_cpu_time_total for one in products)
    flops = sum(one.flops for one in products)
    return Measured(
        statistics.median(ours),
        statistics.median(theirs),
        products_us / whole_us,
        flops / max(1e-6 * products_us, 1e-9),
        error,
        cosine,
    )


def made(family: Family, folder: Path, dtype: torch.dtype) -> Any:
    """The library's model, with random weights, and its checkpoint."""
    config = getattr(transformers, f"{family.kind}Config")(
        text_config={**TEXT, **family.text},
        vision_config=family.vision,
        attn_implementation="sdpa",
        **family.outer,
    )
    model = getattr(transformers, f"{family.kind}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        if not parameter.any():  # some begin as zeros, of which nothing could be told
            torch.nn.init.normal_(parameter, std=0.02)
    model = model.eval().to(dtype)
    model.save_pretrained(folder)
    return model


def asked(
    family: Family, model: Any, dtype: torch.dtype
) -> tuple[TowerInput, Callable[[], Tensor]]:
    """A picture for weft's tower, and a call that lets the library encode the same."""
    spec = family.vision
    if family.grid is not None:
        frames, rows, columns = family.grid
        num_patches = 4 * frames * rows * columns
        patches = torch.randn(num_patches, 3 * 2 * spec["patch_size"] ** 2)
        of_patches = torch.tensor([[frames, 2 * rows, 2 * columns]])
        given = TowerInput("image", num_patches // 4, family.grid, patches)
        typed = patches.to(dtype)

        def call() -> Tensor:
            found: Tensor = model.model.visual(typed, grid_thw=of_patches).pooler_output
            return found

        return given, call
    side = spec["image_size"]
    pixels = torch.randn(3, side, side)
    batch = pixels[None].to(dtype)
    chosen: dict[str, Any] = {}
    if family.kind == "SmolVLM":
        batch = batch[None]
    if hasattr(model.config, "vision_feature_layer"):
        chosen["vision_feature_layer"] = model.config.vision_feature_layer
        chosen["vision_feature_select_strategy"] = model.config.vision_feature_select_strategy

    def call_on_pixels() -> Tensor:
        found = model.model.get_image_features(batch, **chosen).pooler_output
        if isinstance(found, list | tuple):
            (found,) = found
        together: Tensor = found.reshape(-1, found.shape[-1])
        return together

    num_tokens = len(call_on_pixels())
    return TowerInput("image", num_tokens, None, pixels), call_on_pixels


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
