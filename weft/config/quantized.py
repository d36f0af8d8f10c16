"""In which bits the weights of a checkpoint are stored, from its `config.json`: what of the field's
formats is read, and the name of what is not.

Which matrices are stored so, and in which shape, stands in the files: what reads weights looks
there. From here comes only what the files do not say. How activations were quantised when the
checkpoint was made is not obeyed: here it is row by row, as they come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from weft.config.options import SettingsError
from weft.json_types import JsonMapping

BLOCK = 128  # outputs, or inputs, that share a scale
CODES = "codes"  # what weights are stored as that have scales of small groups

READ = (
    "gptq and awq; pack-quantized, int-quantized, float-quantized, mxfp4-pack-quantized and "
    "nvfp4-pack-quantized of compressed-tensors; mxfp4; fp8 of fp8, fbgemm_fp8 and modelopt, with "
    f"a scale for each matrix, output or block of {BLOCK}; NVFP4 of modelopt; bitsandbytes of four "
    "bits; and gguf"
)
EIGHT_BITS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)  # of compressed-tensors
PACKED = "pack-quantized"
FLOATS4 = {"mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4"}
WORD_BITS = (4, 8)  # of codes that are packed into words


# How users may call a method: names of vLLM and SGLang, which have some for their kernels.
METHODS = {
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "awq": "awq",
    "awq_marlin": "awq",
    "compressed-tensors": "compressed-tensors",
    "mxfp4": "mxfp4",
    "fp8": "fp8",
    "fbgemm_fp8": "fbgemm_fp8",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "bitsandbytes": "bitsandbytes",
    "gguf": "gguf",
}


class UnreadFormat(ValueError):
    """The weights have a format that weft cannot read; the message names it."""


@dataclass(frozen=True)
class Quantization:
    """In what the large matrices of a checkpoint are stored."""

    method: str = ""  # the field's name: gptq; "" where nothing is quantised
    # What can be kept of it: fp8 or int8, with scales of whole matrices or of outputs; codes, with
    # scales of groups; else "", also where smaller blocks have scales or several formats stand
    # side by side.
    kept_as: str = ""
    told: str = ""  # for people: int4 (GPTQ, group 128)
    bits: int = 0  # of codes, where the config says it, as the next ones
    group: int = 0  # inputs that share a scale; 0: all of an output
    is_symmetric: bool | None = None  # whether zero is in the middle of the codes; None: unknown
    zero_shift: int = 0  # what is added to zero points as they are stored
    varies: bool = False  # some matrices may have other bits and groups

    @property
    def has_codes(self) -> bool:
        return self.kept_as == CODES

    @property
    def as_stored(self) -> str:
        """For people, where it is kept: int4 (GPTQ, group 128, as stored)."""
        if self.told.endswith(")"):
            return f"{self.told[:-1]}, as stored)"
        return f"{self.told} as stored"


def check_method(asked: str, found: Quantization, name: str) -> None:
    """Raise SettingsError unless the weights of a model are stored as the user says."""
    if asked == "auto" or METHODS[asked] == found.method:
        return
    stored = "not quantised"
    if found.method:
        stored = f"stored as {found.method}"
    raise SettingsError(
        f"--quantization is {asked}, but the weights of {name} are {stored}; --quantize keeps "
        "weights in fewer bits than they are stored in"
    )


def quantization(config: JsonMapping, other: JsonMapping | None = None) -> Quantization:
    """In what the large matrices are stored.

    `config` is `config.json`, `other` the `hf_quant_config.json` of older checkpoints.
    Raises UnreadFormat.
    """
    try:
        return _quantization(config, other or {})
    except (AttributeError, TypeError) as exc:
        raise UnreadFormat("a quantization_config that makes no sense") from exc


def _quantization(config: JsonMapping, other: JsonMapping) -> Quantization:
    found = config.get("quantization_config")
    if found is None:
        if not other:
            return Quantization()
        return _modelopt(other.get("quantization", {}).get("quant_algo"))
    match found.get("quant_method", "mlx" if "bits" in found else "unknown"):
        case "fp8":
            return _fp8("fp8", _blocks(found.get("weight_block_size"), "fp8"))
        case "fbgemm_fp8":
            return _fp8("fbgemm_fp8", "fp8")
        case "modelopt":
            algorithm = found.get("quant_algo")
            return _modelopt(algorithm or found.get("quantization", {}).get("quant_algo"))
        case "gguf":  # in no config.json but ours (`config/gguf.py`)
            types = str(found.get("types") or "")
            return Quantization("gguf", CODES if types else "", types)
        case "mxfp4":
            return _float4("mxfp4", "mxfp4")
        case "bitsandbytes":
            return _bitsandbytes(found)
        case "gptq":
            return _gptq(found)
        case "awq":
            return _awq(found)
        case "compressed-tensors":
            return _compressed_tensors(found)
        case method:
            raise UnreadFormat(str(method)[:64])


def _fp8(method: str, kept_as: str) -> Quantization:
    return Quantization(method, kept_as, f"fp8 ({method})")


def _float4(method: str, kind: str) -> Quantization:
    """Floats of four bits, whose groups the format says."""
    return Quantization(method, CODES, f"{kind} ({method})", bits=4, is_symmetric=True)


def _modelopt(algorithm: Any) -> Quantization:
    if algorithm == "NVFP4":
        return _float4("modelopt", "nvfp4")
    if algorithm != "FP8":
        raise UnreadFormat(f"modelopt, {str(algorithm)[:64]}")
    return _fp8("modelopt", "fp8")


def _bitsandbytes(found: JsonMapping) -> Quantization:
    """Codes of whole rows behind each other, which are widened as they are read."""
    kind = str(found.get("bnb_4bit_quant_type") or "fp4")
    if not found.get("load_in_4bit") or kind not in ("nf4", "fp4"):
        raise UnreadFormat("bitsandbytes, of other than four bits")
    return Quantization("bitsandbytes", told=f"{kind} (bitsandbytes)")


# GPTQ and AWQ


def _gptq(found: JsonMapping) -> Quantization:
    layout = str(found.get("checkpoint_format") or "gptq")
    if found.get("is_marlin_format"):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2"):
        raise UnreadFormat(f"gptq, in the layout {layout[:64]}")
    packed = _packed("gptq", "GPTQ", found)
    # In the first version, one is taken off zero points before they are stored.
    shift = 1 if layout == "gptq" else 0
    return replace(
        packed,
        is_symmetric=bool(found.get("sym", True)),
        zero_shift=shift,
        varies=bool(found.get("dynamic")),
    )


def _awq(found: JsonMapping) -> Quantization:
    version = str(found.get("version") or "gemm").lower()
    if version != "gemm":
        raise UnreadFormat(f"awq, in the layout {version[:64]}")
    packed = _packed("awq", "AWQ", found)
    if packed.bits != 4:
        raise UnreadFormat(f"awq of {packed.bits} bits")
    return replace(packed, is_symmetric=False)


def _packed(method: str, name: str, found: JsonMapping) -> Quantization:
    """Codes in words of 32 bits, as GPTQ and AWQ have them."""
    bits = found.get("bits", found.get("w_bit"))
    if bits not in WORD_BITS:
        raise UnreadFormat(f"{method} of {str(bits)[:64]} bits")
    group = _group(method, found.get("group_size", found.get("q_group_size")))
    return Quantization(method, CODES, _told(f"int{bits}", name, group), bits, group)


def _group(method: str, size: Any) -> int:
    if size in (None, -1):
        return 0
    if type(size) is not int or size <= 0:
        raise UnreadFormat(f"{method} in groups of {str(size)[:64]}")
    return size


def _told(kind: str, name: str, group: int) -> str:
    groups = f"group {group}" if group else "one scale for each output"
    return f"{kind} ({name}, {groups})"


# compressed-tensors


def _compressed_tensors(found: JsonMapping) -> Quantization:
    if (found.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise UnreadFormat("compressed-tensors, sparse")
    if (found.get("transform_config") or {}).get("config_groups"):
        raise UnreadFormat("compressed-tensors, with transforms")
    kinds = list(dict.fromkeys(_kinds(found)))
    if not kinds:
        return Quantization("compressed-tensors")
    if len(kinds) == 1:
        return kinds[0]
    return Quantization(
        method="compressed-tensors",
        kept_as=CODES if any(kind.has_codes for kind in kinds) else "",
        told=", ".join(dict.fromkeys(kind.told for kind in kinds)),
        varies=True,
    )


def _kinds(found: JsonMapping) -> Iterator[Quantization]:
    """That of each group of matrices."""
    for group in found.get("config_groups", {}).values():
        weights = group.get("weights")
        if weights is None:
            continue
        formats = {found.get("format") or EIGHT_BITS[0], group.get("format") or EIGHT_BITS[0]}
        kind = (weights.get("type"), weights.get("num_bits"))
        if PACKED in formats and kind in (("int", 4), ("int", 8)):
            yield _packed_group(weights)
            continue
        floats = next((name for name in FLOATS4 if name in formats), "")
        if floats and kind == ("float", 4):
            yield _float4("compressed-tensors", FLOATS4[floats])
            continue
        name = {("float", 8): "fp8", ("int", 8): "int8"}.get(kind)
        if name is None or not formats <= set(EIGHT_BITS):
            told = f"{kind[0]} of {kind[1]} bits, {', '.join(sorted(map(str, formats)))}"
            raise UnreadFormat(f"compressed-tensors, {told[:200]}")
        if not weights.get("symmetric", True):
            raise UnreadFormat("compressed-tensors, with zero points beside whole bytes")
        yield _eight_bits(weights, name)


def _packed_group(weights: JsonMapping) -> Quantization:
    method = "compressed-tensors"
    bits = weights["num_bits"]
    group = 0
    if weights.get("strategy") == "group":
        group = _group(method, weights.get("group_size"))
    return Quantization(
        method=method,
        kept_as=CODES,
        told=_told(f"int{bits}", method, group),
        bits=bits,
        group=group,
        is_symmetric=bool(weights.get("symmetric", True)),
    )


def _eight_bits(weights: JsonMapping, name: str) -> Quantization:
    method = "compressed-tensors"
    if weights.get("strategy") == "group":
        kept_as = _blocks([1, weights.get("group_size")], name)
    else:
        kept_as = _blocks(weights.get("block_structure"), name)
    return Quantization(method, kept_as, f"{name} ({method})")


def _blocks(sizes: Any, kind: str) -> str:
    """`sizes` are of the blocks, outputs and inputs; None: whole matrices or outputs."""
    if sizes is None:
        return kind
    if not set(sizes) <= {1, BLOCK}:
        raise UnreadFormat(f"{kind} in blocks of {' x '.join(map(str, sizes))[:64]}")
    return ""
