"""In which bits the weights of a checkpoint are stored, from its `config.json`: what of the field's
formats is read, and the name of what is not.

Whatever it is called, what is read is one layout: a matrix in float8 (e4m3) or int8 stands beside
its scales, one for the whole matrix, one for each output, or one for each block of 128 inputs and
as many outputs, or one. How activations were quantised when the checkpoint was made is not obeyed:
here it is row by row, as they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BLOCK = 128  # outputs, or inputs, that share a scale
CODES = "codes"  # what weights are stored as that have scales of small groups

READ = (
    "fp8 and int8 of compressed-tensors, and fp8 of fp8, fbgemm_fp8 and modelopt, with a scale "
    f"for each matrix, output or block of {BLOCK}"
)
FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)  # of compressed-tensors


class UnreadFormat(ValueError):
    """Weights are stored as nobody here reads them; the message names the format."""


def stored_as(config: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> str:
    """In what the large matrices are stored: fp8 or int8, with scales of whole matrices or of
    outputs; codes, with scales of small groups; else "", also where smaller blocks have scales or
    several formats stand side by side.

    `config` is `config.json`, `other` the `hf_quant_config.json` of older checkpoints.
    Raises UnreadFormat.
    """
    try:
        kinds = set(_kinds(config, other or {}))
    except (AttributeError, TypeError) as exc:
        raise UnreadFormat("a quantization_config that makes no sense") from exc
    if len(kinds) == 1:
        return kinds.pop()
    return ""


def _kinds(config: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    found = config.get("quantization_config")
    if found is None:
        if other:
            yield _modelopt(other.get("quantization", {}).get("quant_algo"))
        return
    match found.get("quant_method", "mlx" if "bits" in found else "unknown"):
        case "fp8":
            yield _blocks(found.get("weight_block_size"), "fp8")
        case "fbgemm_fp8":
            yield "fp8"
        case "modelopt":
            yield _modelopt(
                found.get("quant_algo") or found.get("quantization", {}).get("quant_algo")
            )
        case "gguf":  # in no config.json but ours (`config/gguf.py`)
            yield CODES
        case "compressed-tensors":
            yield from _compressed_tensors(found)
        case method:
            raise UnreadFormat(str(method)[:64])


def _modelopt(algorithm: Any) -> str:
    if algorithm != "FP8":
        raise UnreadFormat(f"modelopt, {str(algorithm)[:64]}")
    return "fp8"


def _compressed_tensors(found: Mapping[str, Any]) -> Iterator[str]:
    for group in found.get("config_groups", {}).values():
        weights = group.get("weights")
        if weights is None:
            continue
        formats = {found.get("format") or FORMATS[0], group.get("format") or FORMATS[0]}
        kind = {("float", 8): "fp8", ("int", 8): "int8"}.get(
            (weights.get("type"), weights.get("num_bits"))
        )
        if kind is None or not formats <= set(FORMATS):
            told = (
                f"{weights.get('type')} of {weights.get('num_bits')} bits, "
                f"{', '.join(sorted(map(str, formats)))}"
            )
            raise UnreadFormat(f"compressed-tensors, {told[:200]}")
        if not weights.get("symmetric", True):
            raise UnreadFormat("compressed-tensors, with zero points")
        if weights.get("strategy") == "group":
            yield _blocks([1, weights.get("group_size")], kind)
        else:
            yield _blocks(weights.get("block_structure"), kind)
    if (found.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise UnreadFormat("compressed-tensors, sparse")
    if (found.get("transform_config") or {}).get("config_groups"):
        raise UnreadFormat("compressed-tensors, with transforms")


def _blocks(sizes: Any, kind: str) -> str:
    """`sizes` are of the blocks, outputs and inputs; None: whole matrices or outputs."""
    if sizes is None:
        return kind
    if not set(sizes) <= {1, BLOCK}:
        raise UnreadFormat(f"{kind} in blocks of {' x '.join(map(str, sizes))[:64]}")
    return ""
