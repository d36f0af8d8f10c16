"""Which weights lie packed in several tensors, by what is in the files: a checkpoint may have both
kinds side by side, and its `config.json` names them in too many ways."""

from __future__ import annotations

from collections.abc import Mapping

from weft.config.quantized import Quantization
from weft.executor.weights.packed.gptq import awq_weight, gptq_weight
from weft.executor.weights.packed.weight import Misfit, PackedCodes, PackedTensors
from weft.executor.weights.pieces import read_whole
from weft.executor.weights.safetensors import Content, TensorEntry
from weft.executor.weights.scales import FLOATS, StoredTensor

WEIGHT = ".weight"
BIAS = ".bias"


def packed_weight(
    name: str,
    shape: tuple[int, ...],
    stored: Mapping[str, StoredTensor],
    quantization: Quantization,
) -> PackedCodes | None:
    """The weight of this name and shape, if it is stored packed. Raises Misfit."""
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
    return None


def is_idle_bias(
    base: str, content: Content, entry: TensorEntry, stored: Mapping[str, StoredTensor]
) -> bool:
    """Whether it is the bias of a packed matrix that has none in the model, and holds zeros: some
    programs that quantise write one for every matrix."""
    module = base.removesuffix(BIAS)
    if not base.endswith(BIAS) or f"{module}.qweight" not in stored or entry.dtype not in FLOATS:
        return False
    return not read_whole(content, entry, FLOATS[entry.dtype]).any()
