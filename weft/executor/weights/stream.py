"""Gives a model the tensors of a checkpoint.

What is to be put into a model is matched with what the model wants first, all of it: names, shapes,
types. Then it may be looked through for values that are not finite, and then put. Whoever does all
of that in this order never leaves a model half changed by bad content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.model import BadCheckpoint, UnsupportedModel
from weft.config.quantized import Quantization
from weft.executor.weights.base import in_base
from weft.executor.weights.gguf.codes import FORMATS as BLOCK_FORMATS
from weft.executor.weights.packed.experts import expert_blocks
from weft.executor.weights.packed.find import is_idle_bias, packed_weight
from weft.executor.weights.packed.weight import Misfit
from weft.executor.weights.pieces import PieceBuffer, piece_rows
from weft.executor.weights.safetensors import ITEM_BYTES, Content
from weft.executor.weights.scales import (
    BESIDE,
    EIGHT_BITS,
    FLOATS,
    StoredTensor,
    is_of_a_weight,
    scales_of,
)
from weft.executor.weights.stored import (
    StoredBlocks,
    StoredEightBits,
    StoredFloats,
    StoredTransposed,
    StoredWeight,
    part_of,
)
from weft.models.layers.weight import Weight
from weft.ops.sharding import CannotShard

# Endings of the names of tensors that no model here reads.
IGNORED = (
    "rotary_emb.inv_freq",
    # GPT-NeoX once saved which tokens see which.
    ".attention.bias",
    ".attention.masked_bias",
    "embeddings.position_ids",
    *BESIDE,
)
# Beginnings of those of the other parts of a model, where it is served without these.
OTHER_PARTS = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "audio_tower.",
    "multi_modal_projector.",
    "connector.",
    "mtp.",
    "mtp_layers.",
)
# Tensors that not every use of a checkpoint needs.
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

    def told(self) -> str:
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
    """Match each tensor of the contents with a weight. `what` they are is for the error;
    `quantization`: what is said of those that are packed; `whole`: no weight may be missing;
    `unread`: beginnings of names, within the base model, of tensors that it leaves out.

    Raises BadCheckpoint, naming the tensors, if any is missing, unexpected, of another shape or of
    a type that is none of floating point; eight bits need scales.
    """
    stored: dict[str, StoredTensor] = {}
    for content in contents:
        for name, entry in content.entries.items():
            stored[in_base(name)] = (content, entry)
    by_base = {in_base(name): weight for name, weight in wanted.items()}
    found: list[WeightMatch] = []
    problems = Mismatch()
    spoiled: set[str] = set()  # modules that have a problem of their own
    for base, weight in by_base.items():
        try:
            one = _find(base, weight, stored, quantization or Quantization())
        except Misfit as exc:
            problems.mistyped.append(str(exc))
            spoiled.add(base.rpartition(".")[0])
            continue
        except WrongShape as exc:
            # A tensor of several weights is reported once.
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
    told = problems.told()
    if told:
        raise BadCheckpoint(f"{what} ({told})")
    # In the order of the files: a disk is read from its beginning to its end.
    places = {base: place for place, base in enumerate(stored)}
    return sorted(found, key=lambda match: places[in_base(match.stored.names[0])])


class WrongShape(ValueError):
    """A tensor has another shape than its weight."""


def _find(
    base: str, weight: Weight, stored: Mapping[str, StoredTensor], quantization: Quantization
) -> StoredWeight | None:
    """What is stored for a weight, if anything is. Raises Misfit and WrongShape."""
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
    """A weight that lies in a tensor with others, if it does. Raises Misfit and WrongShape."""
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
        # Blocks hold neighbouring inputs: these come last.
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
    """The names of tensors that no model here reads, and that are not known to be needless."""
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
    """Give the model the content. Raises BadCheckpoint if it cannot be read any more, which leaves
    it half changed."""
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
    """Torch computes on this thread alone: what is done with a piece takes less time than to wake
    other threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def put_tensor(weight: Weight, values: Tensor) -> None:
    """Give a weight its whole content, piece by piece, so that quantising it takes little
    memory."""
    step = len(values)
    if values.dim() == 2:
        step = piece_rows(values.nbytes // max(len(values), 1))
    for start in range(0, len(values), step):
        weight.put(values[start : start + step], start)


def require_finite(matches: Iterable[WeightMatch]) -> None:
    """Read everything to its end. Raises BadCheckpoint, naming the first tensor that is not finite
    everywhere."""
    buffer = PieceBuffer()
    for _, stored in matches:
        stored.require_finite(buffer)


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(name[:200] for name in names[:5])
    return f"{listed}, ..." if len(names) > 5 else listed
