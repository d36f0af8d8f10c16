"""Which formats of quantised checkpoints are read, from configs as published, and what `--quantize
auto` is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.config.machines import MODEL, machine
from weft.config.amounts import GB
from weft.config.engine import EngineConfig
from weft.config.machine import GpuCard
from weft.config.options import SettingsError
from weft.config.quantized import Quantization, UnreadFormat, quantization
from weft.config.resolve import resolve

TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def compressed(
    format: str = "float-quantized", *, changes: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    """What llm-compressor writes; `weights` are of its only group, `changes` of the whole."""
    usual = {
        "num_bits": 8,
        "type": "float",
        "strategy": "channel",
        "symmetric": True,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": {**usual, "block_structure": None, "group_size": None, **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {**group, "input_activations": TOKENS}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        **(changes or {}),
    }


MIXED = {
    "a": {
        "targets": ["re:.*mlp.*"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    },
    "b": {
        "targets": ["re:.*attn.*"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
    },
}


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (None, ""),
        (compressed(), "fp8"),
        (compressed(strategy="tensor"), "fp8"),
        (compressed("int-quantized", type="int"), "int8"),
        (compressed(strategy="block", block_structure=[128, 128]), ""),
        (compressed(strategy="group", group_size=128), ""),
        (compressed("mixed-precision", changes={"config_groups": MIXED}), ""),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),
        (
            {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
            "",
        ),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "codes"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "codes"),
        (compressed("pack-quantized", type="int", num_bits=4), "codes"),
        (compressed("pack-quantized", type="int"), "codes"),
        (compressed("mxfp4-pack-quantized", num_bits=4, group_size=32), "codes"),
        (compressed("nvfp4-pack-quantized", num_bits=4, group_size=16), "codes"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "codes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "codes"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ""),
    ],
)
def test_eight_bits_with_scales_are_read_whatever_they_are_called(
    found: dict[str, Any] | None, kind: str
) -> None:
    assert quantization({"quantization_config": found}).kept_as == kind


def test_older_checkpoints_say_it_in_a_file_of_their_own() -> None:
    older = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    assert quantization({}, older).kept_as == "fp8"
    with pytest.raises(UnreadFormat, match="modelopt, W4A8_AWQ"):
        quantization({}, {"quantization": {"quant_algo": "W4A8_AWQ"}})


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "layout marlin"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "a"}, "gptq in groups of a"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, in the layout gemv"),
        ({"quant_method": "exl2", "bits": 4.0}, "exl2"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, of other"),
        ({"quant_method": "torchao", "quant_type": {}}, "torchao"),
        ({"group_size": 64, "bits": 4}, "mlx"),
        (
            compressed("pack-quantized", type="int", num_bits=3),
            "int of 3 bits, float-quantized, pack-quantized",
        ),
        (compressed("int-quantized", type="int", symmetric=False), "with zero points"),
        (compressed(changes={"sparsity_config": {"format": "sparse-24-bitmask"}}), "sparse"),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, "fp8 in blocks of 64 x 32"),
        (
            {"quant_method": "compressed-tensors", "config_groups": ["a"]},
            "an invalid quantization_config",
        ),
        ("fp8", "an invalid quantization_config"),
    ],
)
def test_other_formats_are_named(found: Any, name: str) -> None:
    with pytest.raises(UnreadFormat, match=name):
        quantization({"quantization_config": found})


def kept(stored: str, *gpus: GpuCard, **settings: Any) -> str:
    return resolve(
        EngineConfig(**settings),
        replace(MODEL, stored=Quantization(kept_as=stored)),
        machine(8, gpus=gpus),
    ).config.quantize


def card(capability: tuple[int, int]) -> GpuCard:
    return GpuCard("card", 80 * GB, 80 * GB, capability)


def test_what_is_stored_in_eight_bits_stays_so_where_the_device_computes_with_them() -> None:
    hopper = card((9, 0))
    ampere = card((8, 6))
    assert [kept("fp8", hopper), kept("fp8", ampere), kept("fp8")] == ["fp8", "none", "none"]
    assert [kept("int8", hopper), kept("int8", ampere), kept("int8")] == ["int8"] * 3
    assert [kept("", hopper), kept("fp8", hopper, quantize="none")] == ["none", "none"]
    assert kept("", hopper, quantize="fp8") == "fp8"


def test_fp8_is_refused_where_it_cannot_be_computed() -> None:
    with pytest.raises(
        SettingsError,
        match="--quantize fp8 needs --device cuda; the device is cpu, which takes int8",
    ):
        kept("fp8", quantize="fp8")
    for option in ("quantize", "kv_dtype"):
        with pytest.raises(
            SettingsError,
            match=r"fp8 needs a GPU of compute capability 8\.9 or higher; card has 8\.6",
        ):
            kept("", card((8, 6)), **{option: "fp8"})


def test_weights_in_fp8_take_half_the_memory() -> None:
    half, whole = (
        resolve(EngineConfig(quantize=name), MODEL, machine(8, gpus=(card((9, 0)),)))
        for name in ("fp8", "none")
    )
    assert 2 * half.sizing.weight_bytes == whole.sizing.weight_bytes
