"""Finds weights that are packed in several tensors, by the tensors in the files. A checkpoint may
have packed and unpacked weights, and there are too many ways in which `config.json` names the
packed ones."""

from __future__ import annotations

from collections.abc import Mapping

from weft.config.quantized import Quantization
from weft.weights.packed.bitsandbytes import bitsandbytes_weight
from weft.weights.packed.compressed import compressed_weight
from weft.weights.packed.float4 import modelopt_weight, mxfp4_weight, nvfp4_weight
from weft.weights.packed.gptq import awq_weight, gptq_weight
from weft.weights.packed.weight import Misfit, PackedCodes, PackedTensors
from weft.weights.pieces import read_all
from weft.weights.safetensors import Content, TensorEntry
from weft.weights.scales import FLOATS, StoredTensor
from weft.weights.stored import StoredWeight

WEIGHT = ".weight"
BIAS = ".bias"


def packed_weight(
    name: str,
    shape: tuple[int, ...],
    stored: Mapping[str, StoredTensor],
    quantization: Quantization,
) -> StoredWeight | None:
    """The weight with this name and shape; None unless it is stored packed. Raises Misfit."""
    tensors = PackedTensors(name.removesuffix(WEIGHT), stored)
    if len(shape) != 2 or not name.endswith(WEIGHT):
        return None
    matrix = (shape[0], shape[1])
    if "qweight" in tensors:
        match quantization.method:
            case "gptq":
                return gptq_weight(tensors, matrix, quantization)
            case "awq":
                return awq_weight(tensors, matrix, quantization)
        raise Misfit(
            f"{tensors.module}.qweight is packed as gptq and awq do it, but config.json says "
            f"{quantization.method or 'nothing of it'}"
        )
    if "weight_packed" in tensors:
        return _compressed(tensors, matrix, quantization)
    if "weight.quant_map" in tensors:
        return bitsandbytes_weight(tensors, matrix)
    if "weight_scale_2" in tensors:
        return modelopt_weight(tensors, matrix)
    return None


def _compressed(
    tensors: PackedTensors, shape: tuple[int, int], quantization: Quantization
) -> PackedCodes:
    """A weight in one of the layouts of compressed-tensors, which differ in the types of codes and
    scales. Raises Misfit."""
    if tensors.any_type("weight_packed")[1].dtype != "U8":
        return compressed_weight(tensors, shape, quantization)
    if tensors.any_type("weight_scale")[1].dtype == "U8":
        return mxfp4_weight(tensors, shape)
    return nvfp4_weight(tensors, shape)


def is_idle_bias(
    base: str, content: Content, entry: TensorEntry, stored: Mapping[str, StoredTensor]
) -> bool:
    """Whether this is the bias of a packed matrix and holds only zeros. Some quantisation tools
    write a bias for every matrix, also for matrices that have none in the model."""
    module = base.removesuffix(BIAS)
    if not base.endswith(BIAS) or f"{module}.qweight" not in stored or entry.dtype not in FLOATS:
        return False
    return not read_all(content, entry, FLOATS[entry.dtype]).any()
