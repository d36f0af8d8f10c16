"""Tensors of a checkpoint's content piece by piece, through one buffer: nothing is ever in memory
twice.

What is to be put into a model is matched with what the model wants first, all of it: names, shapes,
types. Then it may be looked through for values that are not finite, and then put. Whoever does all
of that in this order never leaves a model half changed by bad content.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.model import BadCheckpoint
from weft.executor.weights.gguf.codes import FORMATS as CODE_FORMATS
from weft.executor.weights.gguf.codes import BadScales, codes_of
from weft.executor.weights.safetensors import ITEM_BYTES, Content, TensorEntry
from weft.executor.weights.scales import (
    BESIDE,
    EIGHT_BITS,
    FLOATS,
    StoredScales,
    StoredTensor,
    is_of_a_weight,
    scales_of,
)
from weft.models.layers.weight import Weight
from weft.ops.codes import CodeFormat, Codes
from weft.ops.protocol import ROW_STEP
from weft.ops.quantize import INT8_BY_OUTPUT

PIECE_BYTES = 8 << 20
DTYPES = FLOATS | EIGHT_BITS
EXPONENTS = {
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float8_e4m3fn: (torch.int8, 0x7F),  # has no infinity, and one NaN of either sign
}
# Endings of the names of tensors that no model here reads.
IGNORED = (
    "rotary_emb.inv_freq",
    # GPT-NeoX once saved which tokens see which.
    ".attention.bias",
    ".attention.masked_bias",
    "embeddings.position_ids",
    *BESIDE,
)
# Beginnings of those of the other parts of a model that is served for its text.
OTHER_PARTS = (
    "vision_tower.",
    "visual.",
    "multi_modal_projector.",
    "mtp.",
)
# Tensors that not every use of a checkpoint needs.
HEADS = (
    "lm_head.weight",
    "pooler.dense.weight",
    "pooler.dense.bias",
)
# The name of a base model inside of a larger one; by itself it has none.
BASES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
    "bert.",
    "roberta.",
    "gpt_neox.",
)
# Names that older checkpoints have for a tensor.
OLD_NAMES = {"embed_out.weight": "lm_head.weight"}


class WeightMatch(NamedTuple):
    """A weight of the model, and where its new content lies."""

    weight: Weight
    content: Content
    entry: TensorEntry
    scales: StoredScales | None = None  # if it is stored in eight bits


class Mismatch:
    """The tensors that do not fit the model, by kind of problem."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.misshapen: list[str] = []
        self.mistyped: list[str] = []

    def known(self) -> set[str]:
        """The names of weights that have a problem of their own."""
        return {text.partition(" ")[0] for text in self.misshapen + self.mistyped}

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
    whole: bool = True,
) -> list[WeightMatch]:
    """Match each tensor of the contents with a weight. `what` they are is for the error; `whole`:
    no weight may be missing.

    Raises BadCheckpoint, naming the tensors, if any is missing, unexpected, of another shape or of
    a type that is none of floating point; eight bits need scales.
    """
    contents = list(contents)
    stored: dict[str, StoredTensor] = {}
    for content in contents:
        for name, entry in content.entries.items():
            stored[name] = (content, entry)
    by_base = {in_base(name): weight for name, weight in wanted.items()}
    ignored = (*IGNORED, *(name for name in HEADS if name not in by_base))
    found: dict[str, WeightMatch] = {}
    problems = Mismatch()
    for content in contents:
        for name, entry in content.entries.items():
            weight = by_base.get(in_base(name))
            if weight is not None:
                match = _match(weight, content, entry, stored, problems)
                if match is not None:
                    found[weight.name] = match
                continue
            is_scale = is_of_a_weight(in_base(name), (*by_base, *HEADS))
            is_other = in_base(name).startswith(OTHER_PARTS)
            if not name.endswith(ignored) and not is_scale and not is_other:
                problems.unexpected.append(name)
    if whole:
        known = found.keys() | problems.known()
        problems.missing = [name for name in wanted if name not in known]
    told = problems.told()
    if told:
        raise BadCheckpoint(f"{what} ({told})")
    return list(found.values())


def _match(
    weight: Weight,
    content: Content,
    entry: TensorEntry,
    stored: Mapping[str, StoredTensor],
    problems: Mismatch,
) -> WeightMatch | None:
    """The stored tensor for a weight; None if it does not fit, which is noted in `problems`."""
    if entry.shape != weight.shape:
        problems.misshapen.append(
            f"{weight.name} {list(entry.shape)} instead of {list(weight.shape)}"
        )
        return None
    if entry.dtype in EIGHT_BITS:
        try:
            return WeightMatch(weight, content, entry, scales_of(entry, stored))
        except BadCheckpoint as exc:
            problems.mistyped.append(str(exc))
            return None
    if entry.dtype not in FLOATS and entry.dtype not in CODE_FORMATS:
        read = list(FLOATS)
        if entry.dtype not in ITEM_BYTES:  # no type of safetensors
            read += CODE_FORMATS
        problems.mistyped.append(f"{weight.name} {entry.dtype} instead of one of {', '.join(read)}")
        return None
    return WeightMatch(weight, content, entry)


def put_all(matches: Sequence[WeightMatch]) -> None:
    """Give the model the content. Raises BadCheckpoint if it cannot be read any more, which leaves
    it half changed."""
    buffer = PieceBuffer()
    for weight, _, entry, scales in matches:
        format = _stored_format(entry, scales)
        if format is not None and weight.keep_as is not None:
            weight.keep_as(format)
    for weight, content, entry, scales in matches:
        whole = None if scales is None else scales.read()
        for start, piece in buffer.pieces(content, entry):
            if entry.dtype in CODE_FORMATS:
                _put_codes(weight, _codes(content, entry, piece), start)
            elif scales is None or whole is None:
                weight.put(piece, start)
            else:
                rows, by_row = scales.of(whole, start, piece)
                weight.put(rows, start, by_row)


def put_tensor(weight: Weight, values: Tensor) -> None:
    """Give a weight its whole content, piece by piece, so that quantising it takes little
    memory."""
    step = len(values)
    if values.dim() == 2:
        step = _piece_rows(values.nbytes // max(len(values), 1))
    for start in range(0, len(values), step):
        weight.put(values[start : start + step], start)


def require_finite(matches: Iterable[WeightMatch]) -> None:
    """Read everything to its end. Raises BadCheckpoint, naming the first tensor that is not finite
    everywhere."""
    buffer = PieceBuffer()
    for _, content, entry, scales in matches:
        if scales is not None and not is_finite(scales.read()):
            raise BadCheckpoint(f"{scales.entry.name} has values that are not finite")
        for _, piece in buffer.pieces(content, entry):
            if entry.dtype in CODE_FORMATS:
                _codes(content, entry, piece)
            elif not is_finite(piece):
                raise BadCheckpoint(f"{entry.name} has values that are not finite")


def is_finite(values: Tensor) -> bool:
    """Whether no value is infinite or no number: then not all bits of its exponent are set.

    Numpy is ten times as fast at this as torch, which does it float by float.
    """
    if not values.dtype.is_floating_point:
        return True
    if values.device.type != "cpu":
        return bool(torch.isfinite(values).all())
    kind, exponent = EXPONENTS[values.dtype]
    bits = values.view(kind).numpy()
    return bool(((bits & exponent) != exponent).all())


class PieceBuffer:
    """The memory that all pieces go through."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def pieces(self, content: Content, entry: TensorEntry) -> Iterator[tuple[int, Tensor]]:
        """First row and content of each piece of a tensor, in its own type, blocks of GGUF as rows
        of bytes; a piece lives until the caller asks for the next.

        Matrices come in whole multiples of `ROW_STEP` rows, all other tensors in one piece.
        """
        is_matrix = len(entry.shape) == 2
        num_rows = entry.shape[0] if is_matrix else 1
        row_bytes = entry.num_bytes // max(num_rows, 1)
        widened_bytes = row_bytes
        if entry.dtype not in FLOATS:  # these are widened to float32
            widened_bytes = 4 * math.prod(entry.shape[1:])
        step = _piece_rows(widened_bytes)
        if entry.paired_rows:  # whole heads
            heads = math.lcm(ROW_STEP, entry.paired_rows)
            step = max(step // heads, 1) * heads
        for start in range(0, num_rows, step):
            num = min(step, num_rows - start)
            stored = self._room(num * row_bytes)
            content.read_into(entry.start + start * row_bytes, stored.numpy().data)
            shape = (num, *entry.shape[1:]) if is_matrix else entry.shape
            if entry.dtype in CODE_FORMATS:
                yield start, stored.view(num, row_bytes)
            else:
                piece = stored.view(DTYPES[entry.dtype]).view(shape)
                yield start, _in_halves(piece, entry.paired_rows)

    def _room(self, num_bytes: int) -> Tensor:
        if num_bytes > len(self._bytes):
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes]


def _stored_format(entry: TensorEntry, scales: StoredScales | None) -> CodeFormat | None:
    """The codes that a tensor is stored as, if it is: a matrix may keep these."""
    if entry.dtype == "I8" and scales is not None and scales.is_by_row(entry):
        return INT8_BY_OUTPUT
    return CODE_FORMATS.get(entry.dtype)


def _codes(content: Content, entry: TensorEntry, stored: Tensor) -> Codes:
    """Rows of blocks [n, bytes] as codes [n, in]. Raises BadCheckpoint."""
    rows = _in_halves(stored, entry.paired_rows)
    try:
        return codes_of(entry.dtype, rows.numpy())
    except BadScales as exc:
        raise BadCheckpoint(
            f"{content.label}: {entry.name} has scales that are not finite"
        ) from exc


def _put_codes(weight: Weight, codes: Codes, start: int) -> None:
    """Vectors take no codes."""
    if weight.put_codes is None:
        weight.put(codes.dequantized().view(weight.shape), start)
    else:
        weight.put_codes(codes, start)


def _in_halves(piece: Tensor, paired_rows: int) -> Tensor:
    """Whole heads with the first of all pairs before the second: [heads, D / 2, 2] rows become
    [heads, 2, D / 2]."""
    if not paired_rows:
        return piece
    pairs = piece.view(-1, paired_rows // 2, 2, *piece.shape[1:])
    return pairs.transpose(1, 2).reshape(piece.shape)


def in_base(name: str) -> str:
    """A tensor's name within the base model, or as it is if it stands outside."""
    for base in BASES:
        if name.startswith(base):
            return name.removeprefix(base)
    return OLD_NAMES.get(name, name)


def _piece_rows(row_bytes: int) -> int:
    num_steps = PIECE_BYTES // max(row_bytes, 1) // ROW_STEP
    return max(num_steps, 1) * ROW_STEP


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(name[:200] for name in names[:5])
    return f"{listed}, ..." if len(names) > 5 else listed
