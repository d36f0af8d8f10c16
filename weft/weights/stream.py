"""Loads the tensors of a checkpoint into a model, in three steps:

    matched          matches all names, shapes and types with the model's weights
    require_finite   checks all values (optional)
    put_all          loads the content

In this order, bad content never leaves a model half changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.model import BadCheckpoint, UnsupportedModel
from weft.config.quantized import Quantization
from weft.models.layers.weight import Weight
from weft.ops.sharding import CannotShard
from weft.weights.base import in_base
from weft.weights.gguf.codes import FORMATS as BLOCK_FORMATS
from weft.weights.packed.experts import expert_blocks
from weft.weights.packed.find import is_idle_bias, packed_weight
from weft.weights.packed.weight import Misfit
from weft.weights.pieces import PieceBuffer, piece_rows
from weft.weights.safetensors import ITEM_BYTES, Content
from weft.weights.scales import (
    BESIDE,
    EIGHT_BITS,
    FLOATS,
    StoredTensor,
    is_of_a_weight,
    scales_of,
)
from weft.weights.stored import (
    StoredBlocks,
    StoredEightBits,
    StoredFloats,
    StoredTransposed,
    StoredWeight,
    part_of,
)

# Endings of the names of tensors that no model of weft reads.
IGNORED = (
    "rotary_emb.inv_freq",
    # GPT-NeoX once saved its attention mask.
    ".attention.bias",
    ".attention.masked_bias",
    "embeddings.position_ids",
    *BESIDE,
)
# Prefixes of the names of tensors of parts that a model may be served without.
OTHER_PARTS = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "audio_tower.",
    "multi_modal_projector.",
    "connector.",
    "embed_vision.",
    "embed_audio.",
    "vision_embedder.",
    "mtp.",
    "mtp_layers.",
)
# Tensors that are ignored if the model does not need them.
HEADS = (
    "lm_head.weight",
    "pooler.dense.weight",
    "pooler.dense.bias",
)


class WeightMatch(NamedTuple):
    """A weight of the model, and its new content."""

    weight: Weight
    stored: StoredWeight


class Mismatch:
    """The tensors that do not fit the model, by kind of problem."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.misshapen: list[str] = []
        self.mistyped: list[str] = []

    def line(self) -> str:
        """All problems on one line; "" if there is none."""
        problems = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.misshapen,
            "of another type": self.mistyped,
        }
        parts = []
        for kind, names in problems.items():
            if names:
                parts.append(f"{len(names)} {kind}: {_some(names)}")
        return "; ".join(parts)


def matched(
    wanted: dict[str, Weight],
    contents: Iterable[Content],
    what: str,
    *,
    quantization: Quantization | None = None,
    whole: bool = True,
    unread: tuple[str, ...] = (),
) -> list[WeightMatch]:
    """Match each tensor of the contents with a weight. `what`: beginning of the error message;
    `quantization`: the config of packed weights; `whole`: no weight may be missing; `unread`:
    prefixes of the names, within the base model, of tensors that the model leaves out.

    Raises BadCheckpoint, naming the tensors, if a tensor is missing, unexpected, of another shape
    or of a type that weft cannot read, or if eight bits lack their scales.
    """
    stored: dict[str, StoredTensor] = {}
    for content in contents:
        for name, entry in content.entries.items():
            stored[in_base(name)] = (content, entry)
    by_base = {in_base(name): weight for name, weight in wanted.items()}
    found: list[WeightMatch] = []
    problems = Mismatch()
    spoiled: set[str] = set()  # modules with an error; their other tensors are not reported
    for base, weight in by_base.items():
        try:
            one = _find(base, weight, stored, quantization or Quantization())
        except Misfit as exc:
            problems.mistyped.append(str(exc))
            spoiled.add(base.rpartition(".")[0])
            continue
        except WrongShape as exc:
            # A tensor that contains several weights is reported once.
            if str(exc) not in problems.misshapen:
                problems.misshapen.append(str(exc))
            continue
        if one is not None:
            found.append(WeightMatch(weight, one))
        elif whole:
            problems.missing.append(weight.name)
    used = {in_base(name) for match in found for name in match.stored.names}
    others = {base: one for base, one in stored.items() if base.rpartition(".")[0] not in spoiled}
    problems.unexpected = _unexpected(others, by_base, used, unread)
    line = problems.line()
    if line:
        raise BadCheckpoint(f"{what} ({line})")
    # In the order of the files, so that a disk is read sequentially.
    indices = {base: index for index, base in enumerate(stored)}
    return sorted(found, key=lambda match: indices[in_base(match.stored.names[0])])


class WrongShape(ValueError):
    """A tensor has another shape than its weight."""


def _find(
    base: str, weight: Weight, stored: Mapping[str, StoredTensor], quantization: Quantization
) -> StoredWeight | None:
    """The stored form of a weight; None if there is none. Raises Misfit and WrongShape."""
    packed = packed_weight(base, weight.shape, stored, quantization)
    if packed is not None:
        return packed
    if base not in stored:
        return _part_of_stack(weight, stored)
    content, entry = stored[base]
    if entry.shape != weight.shape:
        raise WrongShape(f"{weight.name} {list(entry.shape)} instead of {list(weight.shape)}")
    if entry.dtype in FLOATS:
        return StoredFloats(content, entry)
    if entry.dtype in BLOCK_FORMATS:
        return StoredBlocks(content, entry)
    if entry.dtype in EIGHT_BITS:
        try:
            return StoredEightBits(content, entry, scales_of(entry, base, stored))
        except BadCheckpoint as exc:
            raise Misfit(str(exc)) from exc
    read = list(FLOATS)
    if entry.dtype not in ITEM_BYTES:  # no type of safetensors
        read += BLOCK_FORMATS
    raise Misfit(f"{weight.name} {entry.dtype} instead of one of {', '.join(read)}")


def _part_of_stack(weight: Weight, stored: Mapping[str, StoredTensor]) -> StoredWeight | None:
    """The stored form of a weight in a tensor that contains several weights; None if there is no
    such tensor. Raises Misfit and WrongShape."""
    for stack in weight.stacks:
        if len(stack.shape) == 3 and not stack.is_transposed:
            blocks = expert_blocks(in_base(stack.name), weight, stack, stored)
            if blocks is not None:
                return blocks
    known = [stack for stack in weight.stacks if in_base(stack.name) in stored]
    for stack in known:
        content, entry = stored[in_base(stack.name)]
        if entry.shape != stack.shape:
            continue
        if entry.dtype in FLOATS:
            part = part_of(entry, weight, stack)
            if stack.is_transposed:
                return StoredTransposed(content, part)
            return StoredFloats(content, part)
        # Blocks hold consecutive inputs, so inputs must be the last dimension.
        if entry.dtype in BLOCK_FORMATS and not stack.is_transposed:
            return StoredBlocks(content, part_of(entry, weight, stack))
    if not known:
        return None
    entry = stored[in_base(known[0].name)][1]
    if entry.shape != known[0].shape:
        expected = list(known[0].shape)
        raise WrongShape(f"{entry.name} {list(entry.shape)} instead of {expected}")
    raise Misfit(f"{entry.name} {entry.dtype} instead of one of {', '.join(FLOATS)}")


def _unexpected(
    stored: Mapping[str, StoredTensor],
    wanted: Mapping[str, Weight],
    used: set[str],
    unread: tuple[str, ...],
) -> list[str]:
    """The names of tensors that no weight matches and that may not be ignored."""
    left_out = (*unread, *(part for part in OTHER_PARTS if not _has_part(wanted, part)))
    ignored = (*IGNORED, *(name for name in HEADS if name not in wanted))
    weights = {*wanted, *HEADS}
    found = []
    for base, (content, entry) in stored.items():
        if base in used or base in wanted or is_of_a_weight(base, weights):
            continue
        if entry.name.endswith(ignored) or base.startswith(left_out):
            continue
        if not is_idle_bias(base, content, entry, stored):
            found.append(entry.name)
    return found


def _has_part(wanted: Mapping[str, Weight], part: str) -> bool:
    return any(name.startswith(part) for name in wanted)


def put_all(matches: Sequence[WeightMatch]) -> None:
    """Load all content into the model. Raises UnsupportedModel if codes cannot be divided between
    ranks, and BadCheckpoint if content cannot be read any more; then the model is half changed."""
    buffer = PieceBuffer()
    for weight, stored in matches:
        try:
            stored.offer(weight)
        except CannotShard as exc:
            raise UnsupportedModel(f"--tp-size: {weight.name} cannot be divided: {exc}") from exc
    with _without_threads():
        for weight, stored in matches:
            stored.put_into(weight, buffer)


@contextmanager
def _without_threads() -> Iterator[None]:
    """Let torch compute on this thread only: the work on a piece takes less time than waking other
    threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def put_tensor(weight: Weight, values: Tensor) -> None:
    """Load the whole content of a weight, piece by piece, so that its quantisation needs little
    memory."""
    step = len(values)
    if values.dim() == 2:
        step = piece_rows(values.nbytes // max(len(values), 1))
    for start in range(0, len(values), step):
        weight.put(values[start : start + step], start)


def require_finite(matches: Iterable[WeightMatch]) -> None:
    """Read all content. Raises BadCheckpoint, naming the first tensor with a value that is not
    finite."""
    buffer = PieceBuffer()
    for _, stored in matches:
        stored.require_finite(buffer)


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(name[:200] for name in names[:5])
    return f"{listed}, ..." if len(names) > 5 else listed
