"""Compiles the kernels for an H100 or H200 on a machine without a GPU, and prints what became of
each as JSON.

A program of its own: in Triton's interpreter nothing is compiled. Registers, stack and instructions
are read from the machine code with the `cuobjdump` that Triton brings.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weft.ops.triton.cut import collect_kernel, floor_kernel, survey_kernel, threshold_kernel
from weft.ops.triton.decode import combine_kernel, decode_kernel
from weft.ops.triton.elementwise import (
    quantize_kernel,
    rms_norm_kernel,
    scaled_kernel,
    silu_and_mul_kernel,
)
from weft.ops.triton.extend import extend_kernel
from weft.ops.triton.launches import (
    COLUMNS,
    CUT_BLOCK,
    CUT_GROUP,
    NORM_WARPS,
    ROTARY_TOKENS,
    STATE_COLUMNS,
    STATE_TOKENS,
    STATE_WARPS,
    VOCAB_BLOCK,
    decode_launch,
    extend_launch,
    power_of_two,
)
from weft.ops.triton.rotary import rotary_store_kernel
from weft.ops.triton.sampling import (
    best_of_block_kernel,
    best_of_row_kernel,
    draw_kernel,
    logprob_kernel,
    mask_kernel,
)
from weft.ops.triton.states import (
    conv_kernel,
    delta_kernel,
    lightning_kernel,
    norm_and_gate_kernel,
    scan_kernel,
)

TARGET = GPUTarget("cuda", 90, 32)
INSTRUCTIONS = {
    "wgmma": "HGMMA",
    "mma": "HMMA",
    "async_copies": "LDGSTS",
    "spills": "STL",
    "wide_loads": r"LDG\S*\.128",
    "float8": r"F2FP\S*E4M3",
}
PLAIN = {"scale": "fp32", "v_scale": "fp32", "eps": "fp32", "k_factor": "fp32", "v_factor": "fp32"}
FLOATS = "scales row_scales logits max_logits temperature top_p min_p bounds scores cos sin parts logs norm maxima floor found sinks"
INTS = "rows kv_lens q_indptr tile_req tile_start decode_req table positions slots sums top_k keys ids masks num_found"


def compiled(
    kernel: Any, types: dict[str, str], warps: int, stages: int = 3, **constants: Any
) -> dict[str, int]:
    """Pointers and strides are multiples of 16, as they are when a model runs."""
    arrays = {
        **dict.fromkeys(FLOATS.split(), "*fp32"),
        **dict.fromkeys(INTS.split(), "*i32"),
        "tokens": "*i64",
    }
    known = {**PLAIN, **{f"{name}_ptr": kind for name, kind in arrays.items()}, **types}
    signature = {}
    attrs = {}
    for place, name in enumerate(kernel.arg_names):
        kind = "*bf16" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else known.get(name, kind)
        if name.endswith(("_ptr", "stride")):
            attrs[(place,)] = [["tt.divisibility", 16]]
    where = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=where, attrs=attrs)
    code = triton.compile(source, target=TARGET, options={"num_warps": warps, "num_stages": stages})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        usage, listing = (
            subprocess.run(
                [tool, how, file.name], capture_output=True, text=True, check=True
            ).stdout
            for how in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    counts = {name: len(re.findall(rf"\b{word}", listing)) for name, word in INSTRUCTIONS.items()}
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": code.metadata.shared,
        **counts,
    }


def attention(
    decode: bool,
    head_dim: int,
    group: int,
    kv: str,
    window: int = 0,
    splits: int = 8,
    sinks: bool = False,
) -> dict[str, int]:
    launch = (decode_launch if decode else extend_launch)(head_dim, group)
    types = {"k_ptr": kv, "v_ptr": kv}
    constants: dict[str, Any] = {
        "KV_HEADS": 8,
        "GROUP": group,
        "D": head_dim,
        "D_PAD": power_of_two(head_dim),
    }
    constants |= {"ROWS": launch.rows, "KEYS": launch.keys, "WINDOW": window, "CAP": 0.0}
    constants["CHUNKED"] = False
    constants |= {"HEAD_STRIDE": head_dim, "SINKS": sinks, "GATED": False}
    if decode:
        constants["SPLIT"] = splits > 1
        types |= {"parts_ptr": "*fp32" if splits > 1 else "*bf16"}
    return compiled(
        decode_kernel if decode else extend_kernel, types, launch.warps, launch.stages, **constants
    )


def rotary(tokens: int, kv: str) -> dict[str, int]:
    constants = {
        "HEADS": 32,
        "Q_STRIDE": 128,
        "KV_HEADS": 8,
        "D": 128,
        "HALF_PAD": 64,
        "TOKENS": tokens,
        "NORMED": True,
    }
    types = {"k_ptr": kv, "v_ptr": kv}
    warps = 1 if tokens == 1 else 4
    return compiled(rotary_store_kernel, types, warps, FP8=kv != "*bf16", **constants)


OF_STATES = "indptr reads writes kept_indptr kept_lens kept_slots"
WEIGHTS_OF_STATES = "states weight bias decay decay_log decay_bias step_bias skip"


def states(kernel: Any, warps: int, **constants: Any) -> dict[str, int]:
    """Of Qwen3-Next and Granite 4."""
    types = {f"{name}_ptr": "*i32" for name in OF_STATES.split()}
    types |= {f"{name}_ptr": "*fp32" for name in WEIGHTS_OF_STATES.split()}
    if kernel is norm_and_gate_kernel:
        types |= {"x_ptr": "*fp32"}
    if kernel in (delta_kernel, lightning_kernel, scan_kernel):
        types |= {"out_ptr": "*fp32"}
    return compiled(kernel, types, warps, **constants)


def sampling(kernel: Any, **constants: Any) -> dict[str, int]:
    types = {"rows_ptr": "*i64", "out_ptr": "*fp32", "weights_ptr": "*i64"}
    return compiled(kernel, types, 8, VOCAB=151_936, **constants)


ALL: dict[str, Callable[[], dict[str, int]]] = {
    **{
        f"extend {head_dim} x {group}{name}": partial(attention, False, head_dim, group, kv, window)
        for head_dim, group, kv, window, name in (
            (64, 4, "*bf16", 0, ""),
            (128, 4, "*bf16", 0, ""),
            (128, 2, "*bf16", 4096, ", window"),
            (128, 4, "*fp8e4nv", 0, ", fp8"),
            (256, 8, "*bf16", 0, ""),
            (96, 1, "*bf16", 0, ""),
        )
    },
    **{
        f"decode {head_dim} x {group}{name}": partial(attention, True, head_dim, group, kv, 0, splits)
        for head_dim, group, kv, splits, name in (
            (64, 4, "*bf16", 8, ""),
            (128, 4, "*bf16", 8, ""),
            (128, 2, "*bf16", 1, ", one split"),
            (128, 4, "*fp8e4nv", 8, ", fp8"),
            (256, 8, "*bf16", 8, ""),
        )
    },
    "extend 64 x 8, window and sinks": partial(attention, False, 64, 8, "*bf16", 128, sinks=True),
    "decode 64 x 8, sinks": partial(attention, True, 64, 8, "*bf16", sinks=True),
    "combine": lambda: compiled(
        combine_kernel, {}, 4,
        HEADS=32, D=128, D_PAD=128, HEAD_STRIDE=128, GATED=False, SPLITS=64, SPLITS_PAD=64,
    ),
    "rotary, few tokens": lambda: rotary(1, "*bf16"),
    "rotary, many tokens": lambda: rotary(ROTARY_TOKENS, "*bf16"),
    "rotary, fp8": lambda: rotary(ROTARY_TOKENS, "*fp8e4nv"),
    "norm": lambda: compiled(rms_norm_kernel, {}, NORM_WARPS, SIZE=4096, BLOCK=4096),
    "norm and fp8": lambda: compiled(
        quantize_kernel, {"kept_ptr": "*fp8e4nv"}, NORM_WARPS,
        SIZE=4096, BLOCK=4096, NORMED=True, LARGEST=448.0, INTEGER=False,
    ),
    "norm and int8": lambda: compiled(
        quantize_kernel, {"kept_ptr": "*i8"}, NORM_WARPS,
        SIZE=4096, BLOCK=4096, NORMED=True, LARGEST=127.0, INTEGER=True,
    ),
    "short convolution": lambda: states(
        conv_kernel, 4,
        C=8192, TAPS=4, TAPS_PAD=4, LANES=16, GATED=False, BIAS=True,
        TOKENS=STATE_TOKENS, COLUMNS=STATE_COLUMNS,
    ),
    "gated convolution": lambda: states(
        conv_kernel, 4,
        C=2048, TAPS=3, TAPS_PAD=4, LANES=16, GATED=True, BIAS=False,
        TOKENS=STATE_TOKENS, COLUMNS=STATE_COLUMNS,
    ),
    "delta rule": lambda: states(
        delta_kernel, STATE_WARPS,
        KEY_HEADS=16, HEADS=32, BLOCKS=8, K=128, K_PAD=128, LANES=16, TILED=False,
    ),
    "mamba": lambda: states(
        scan_kernel, STATE_WARPS,
        GROUPS=1, HEADS=48, BLOCKS=4, N=128, N_PAD=128, LANES=16,
    ),
    "lightning": lambda: states(
        lightning_kernel, STATE_WARPS,
        HEADS=64, BLOCKS=8, K=128, K_PAD=128, LANES=16,
    ),
    "norm and gate": lambda: states(
        norm_and_gate_kernel, 4,
        PARTS=1, SIZE=3072, BLOCK=4096, SHARED=True, NORMED=True, GATES_FIRST=True,
        BY_SIGMOID=False,
    ),
    "gate": lambda: compiled(silu_and_mul_kernel, {}, 4, SIZE=14336, BLOCK=COLUMNS),
    "scaled": lambda: compiled(scaled_kernel, {}, 4, SIZE=4096, BLOCK=COLUMNS, BIAS=True, ADD=True),
    "peak of block": lambda: sampling(best_of_block_kernel, BLOCK=VOCAB_BLOCK),
    "peak of row": lambda: compiled(best_of_row_kernel, {}, 1, BLOCKS=38, BLOCKS_PAD=64, DRAWN=True),
    "survey": lambda: sampling(survey_kernel, BLOCK=VOCAB_BLOCK, GROUP=CUT_GROUP),
    "floor": lambda: sampling(floor_kernel, GROUPS=2432, BLOCKS=38, BLOCKS_PAD=64, BLOCK=CUT_BLOCK),
    "collect": lambda: sampling(collect_kernel, BLOCK=VOCAB_BLOCK),
    "threshold": lambda: sampling(threshold_kernel, BLOCKS=38, BLOCKS_PAD=64, BLOCK=CUT_BLOCK),
    "draw": lambda: sampling(draw_kernel, BLOCK=VOCAB_BLOCK, CUT=True),
    "mask": lambda: sampling(mask_kernel, BLOCK=VOCAB_BLOCK),
    "log probabilities": lambda: sampling(logprob_kernel, BLOCK=VOCAB_BLOCK),
}  # fmt: skip

if __name__ == "__main__":
    for name in sys.argv[1:] or ALL:
        print(json.dumps({"kernel": name, **ALL[name]()}), flush=True)
