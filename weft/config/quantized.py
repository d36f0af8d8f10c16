"""The storage format of a checkpoint's weights, read from its `config.json`: the formats that weft
reads, and the names of those that it does not.

The weight files themselves show which matrices are quantised, and their shapes; the loader reads
that there. This module has only facts that the files do not contain. The checkpoint's quantisation
of activations is ignored: weft quantises activations row by row at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from weft.config.options import SettingsError
from weft.json_types import JsonMapping

BLOCK = 128  # outputs or inputs that share a scale
CODES = "codes"  # the kind of weights with scales of small groups

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
)  # formats of compressed-tensors
PACKED = "pack-quantized"
FLOATS4 = {"mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4"}
WORD_BITS = (4, 8)  # bits of codes that are packed into words


# The user's name of a method → the method. vLLM and SGLang also have names of kernels.
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
    """The weights have a format that weft cannot read; the message is its name."""


@dataclass(frozen=True)
class Quantization:
    """The storage format of the large matrices of a checkpoint."""

    method: str = ""  # the field's name: gptq; "" if nothing is quantised
    # The format that weft can keep: fp8 or int8, with scales of whole matrices or of outputs;
    # codes, with scales of groups; else "", also if smaller blocks have scales, or if several
    # formats without codes are mixed.
    kept_as: str = ""
    shown_name: str = ""  # description for users: int4 (GPTQ, group 128)
    bits: int = 0  # bits of codes; this and the next three fields only if the config has them
    group: int = 0  # inputs that share a scale; 0: all inputs of an output
    is_symmetric: bool | None = None  # whether zero is in the middle of the codes; None: unknown
    zero_shift: int = 0  # added to stored zero points
    varies: bool = False  # some matrices may have other bits and groups

    @property
    def has_codes(self) -> bool:
        return self.kept_as == CODES

    @property
    def as_stored(self) -> str:
        """Description for users if the format is kept: int4 (GPTQ, group 128, as stored)."""
        if self.shown_name.endswith(")"):
            return f"{self.shown_name[:-1]}, as stored)"
        return f"{self.shown_name} as stored"


def check_method(asked: str, found: Quantization, name: str) -> None:
    """Raise SettingsError unless the model's weights have the storage format `asked`."""
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
    """The storage format of the large matrices.

    `config` is `config.json`, `other` the `hf_quant_config.json` of older checkpoints.
    Raises UnreadFormat.
    """
    try:
        return _quantization(config, other or {})
    except (AttributeError, TypeError) as exc:
        raise UnreadFormat("an invalid quantization_config") from exc


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
        case "gguf":  # only in weft's own config.json (`config/gguf.py`)
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
    """Floats of four bits; the format defines their groups."""
    return Quantization(method, CODES, f"{kind} ({method})", bits=4, is_symmetric=True)


def _modelopt(algorithm: Any) -> Quantization:
    if algorithm == "NVFP4":
        return _float4("modelopt", "nvfp4")
    if algorithm != "FP8":
        raise UnreadFormat(f"modelopt, {str(algorithm)[:64]}")
    return _fp8("modelopt", "fp8")


def _bitsandbytes(found: JsonMapping) -> Quantization:
    """Codes of all rows in sequence, which are expanded when they are read."""
    kind = str(found.get("bnb_4bit_quant_type") or "fp4")
    if not found.get("load_in_4bit") or kind not in ("nf4", "fp4"):
        raise UnreadFormat("bitsandbytes, of other than four bits")
    return Quantization("bitsandbytes", shown_name=f"{kind} (bitsandbytes)")


# GPTQ and AWQ


def _gptq(found: JsonMapping) -> Quantization:
    layout = str(found.get("checkpoint_format") or "gptq")
    if found.get("is_marlin_format"):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2"):
        raise UnreadFormat(f"gptq, in the layout {layout[:64]}")
    packed = _packed("gptq", "GPTQ", found)
    # The first version of the format stores zero points minus 1.
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
    """Codes in words of 32 bits, as in GPTQ and AWQ."""
    bits = found.get("bits", found.get("w_bit"))
    if bits not in WORD_BITS:
        raise UnreadFormat(f"{method} of {str(bits)[:64]} bits")
    group = _group(method, found.get("group_size", found.get("q_group_size")))
    return Quantization(method, CODES, _shown_name(f"int{bits}", name, group), bits, group)


def _group(method: str, size: Any) -> int:
    if size in (None, -1):
        return 0
    if type(size) is not int or size <= 0:
        raise UnreadFormat(f"{method} in groups of {str(size)[:64]}")
    return size


def _shown_name(kind: str, name: str, group: int) -> str:
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
        shown_name=", ".join(dict.fromkeys(kind.shown_name for kind in kinds)),
        varies=True,
    )


def _kinds(found: JsonMapping) -> Iterator[Quantization]:
    """The format of each group of matrices. Raises UnreadFormat."""
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
            shown_name = f"{kind[0]} of {kind[1]} bits, {', '.join(sorted(map(str, formats)))}"
            raise UnreadFormat(f"compressed-tensors, {shown_name[:200]}")
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
        shown_name=_shown_name(f"int{bits}", method, group),
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
    """`kept_as` of eight bits. `sizes`: outputs and inputs of a block; None: scales are of whole
    matrices or outputs. Raises UnreadFormat."""
    if sizes is None:
        return kind
    if not set(sizes) <= {1, BLOCK}:
        raise UnreadFormat(f"{kind} in blocks of {' x '.join(map(str, sizes))[:64]}")
    return ""
