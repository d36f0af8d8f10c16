"""MobileNetV5, an encoder of square pictures: levels of convolutions, each of which halves the
sides of the picture, and attention of all pixels to a thinned picture. The outputs of the last two
levels together become a square of vectors.

Levels are described as in timm, whose names Gemma 3n's checkpoints have. Source: timm's
`mobilenetv5`; of the blocks arXiv:2404.10518.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from weft.config.config_json import get, number, require, section, size
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonMapping

ARCHITECTURE = "mobilenetv5_300m_enc"
STEP = 8  # numbers of a pixel are multiples of it
MOST_LEVELS = 4
MOST_BLOCKS = 64  # of a level
MOST_NUMBERS = 1 << 14  # of a pixel
MAX_KERNEL = 15
SIDE = 768  # pixels of the largest picture


@dataclass(frozen=True)
class EdgeBlock:
    """A convolution that widens pixels, and a product that narrows them."""

    size: int  # numbers of a pixel after it
    kernel: int
    ratio: int  # numbers within it for each number before it
    stride: int = 1

    def num_parameters(self, in_size: int) -> int:
        inner = self.ratio * in_size
        return inner * (self.kernel**2 * in_size + self.size)


@dataclass(frozen=True)
class InvertedBlock:
    """A product that widens pixels, and one that narrows them, with convolutions of each number by
    itself before, and between them."""

    size: int
    first_kernel: int  # 0: no convolution
    kernel: int  # of the one between; 0: none
    ratio: int
    stride: int = 1

    def num_parameters(self, in_size: int) -> int:
        inner = self.ratio * in_size
        convolutions = self.first_kernel**2 * in_size + self.kernel**2 * inner
        return convolutions + inner * (in_size + self.size)


@dataclass(frozen=True)
class QueryBlock:
    """Attention of all pixels to those of a picture that may be thinned, with one head of keys and
    values."""

    size: int
    num_heads: int
    head_dim: int
    key_stride: int  # of the convolutions that thin the picture; 1: there are none
    kernel: int = 3
    stride: int = 1

    @property
    def attention_size(self) -> int:
        return self.num_heads * self.head_dim

    def num_parameters(self, in_size: int) -> int:
        of_outputs = self.attention_size * (in_size + self.size)
        of_keys = 2 * self.head_dim * in_size
        if self.key_stride > 1:
            of_keys += 2 * self.kernel**2 * in_size
        return of_outputs + of_keys


Block: TypeAlias = EdgeBlock | InvertedBlock | QueryBlock
Levels: TypeAlias = tuple[tuple[Block, ...], ...]


def _attending(size: int, num_blocks: int, query: QueryBlock) -> list[Block]:
    """Attention and products in turns."""
    narrow = InvertedBlock(size, 0, 0, 2)
    return [query, narrow] * num_blocks


# The levels of ARCHITECTURE.
LEVELS: Levels = (
    (EdgeBlock(128, 3, 4, 2), EdgeBlock(128, 3, 4), EdgeBlock(128, 3, 4)),
    (
        InvertedBlock(256, 3, 5, 6, 2),
        InvertedBlock(256, 5, 0, 4),
        InvertedBlock(256, 3, 0, 4),
        InvertedBlock(256, 5, 0, 4),
        InvertedBlock(256, 3, 0, 4),
    ),
    (
        InvertedBlock(640, 5, 5, 6, 2),
        *[InvertedBlock(640, 5, 0, 4)] * 7,
        InvertedBlock(640, 0, 0, 1),
        *_attending(640, 14, QueryBlock(640, 12, 64, 2)),
    ),
    (
        InvertedBlock(1_280, 5, 5, 6, 2),
        *_attending(1_280, 19, QueryBlock(1_280, 16, 96, 1)),
    ),
)


@dataclass(frozen=True, kw_only=True)
class MobileNetSpec:
    stem_size: int = 64  # numbers of a pixel after the first convolution
    levels: Levels = LEVELS
    out_size: int = 2_048
    out_side: int = 16  # vectors of a side of the square

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of a pixel after each level."""
        return tuple(level[-1].size for level in self.levels)

    @property
    def fused_size(self) -> int:
        """Numbers of a pixel of the last two levels together."""
        return sum(self.sizes[-2:])

    @property
    def side_step(self) -> int:
        """The sides of pictures are multiples of it, in pixels: the pixels of the last level but
        one that become a vector are a square."""
        return self.out_side << len(self.levels)

    @property
    def num_parameters(self) -> int:
        num = 27 * self.stem_size
        for level, before in zip(self.levels, (self.stem_size, *self.sizes), strict=False):
            in_size = before
            for block in level:
                num += block.num_parameters(in_size)
                in_size = block.size
        return num + 2 * self.fused_size * (self.fused_size + self.out_size)

    @property
    def num_work_floats(self) -> int:
        most = self.stem_size * (SIDE // 2) ** 2
        side = SIDE // 2
        for level, in_size in zip(self.levels, (self.stem_size, *self.sizes), strict=False):
            first = level[0]
            # What a block widens has the sides of the picture before it.
            inner = 0 if isinstance(first, QueryBlock) else first.ratio * in_size
            most = max(most, side**2 * (inner + in_size))
            side //= 2
        # An input, a copy with borders, and an output.
        return 3 * most


def mobilenet(vision: JsonMapping, out_size: int) -> MobileNetSpec:
    """The encoder of a `vision_config`. `model_args` has what timm calls the arguments of a model:
    the blocks of each level, decoded. Raises UnsupportedModel."""
    require(vision, "architecture", ARCHITECTURE)
    given = section(vision, "model_args")
    known = ("block_args", "stem_size", "msfa_output_resolution")
    for key in given:
        if key not in known:
            raise UnsupportedModel(
                f"model_args has {key[:64]!r}, which is not supported; supported are "
                f"{', '.join(known)}"
            )
    spec = MobileNetSpec(
        stem_size=_numbers_of(given, "stem_size", 64),
        levels=_levels(get(given, "block_args", list, [])) or LEVELS,
        out_size=out_size,
        out_side=size(given, "msfa_output_resolution", 16),
    )
    if SIDE % spec.side_step:
        raise UnsupportedModel(
            f"msfa_output_resolution is {spec.out_side} after {len(spec.levels)} levels; a side of "
            f"{SIDE} pixels must be a multiple of {spec.side_step}"
        )
    return spec


def _levels(written: list[Any]) -> Levels:
    if not written:
        return ()
    are_lists = all(isinstance(level, list) and 0 < len(level) <= MOST_BLOCKS for level in written)
    if not 2 <= len(written) <= MOST_LEVELS or not are_lists:
        raise UnsupportedModel(
            f"block_args has {len(written)} levels; 2 to {MOST_LEVELS} are supported, each a list "
            f"of 1 to {MOST_BLOCKS} blocks"
        )
    return tuple(
        tuple(_block(block, is_first=not index) for index, block in enumerate(level))
        for level in written
    )


def _block(written: Any, *, is_first: bool) -> Block:
    if not isinstance(written, Mapping):
        raise UnsupportedModel(f"block_args has {str(written)[:64]}; a block must be an object")
    kind = get(written, "block_type", str, "")
    if kind not in _READERS:
        raise UnsupportedModel(
            f"block_type is {kind[:64]!r}; supported are {', '.join(map(repr, _READERS))}"
        )
    require(written, "noskip", False)
    require(written, "se_ratio", 0.0)
    require(written, "act_layer", None)
    stride = get(written, "stride", int, 1)
    if stride != (2 if is_first else 1) or (is_first and kind == "mqa"):
        raise UnsupportedModel(
            f"a block of the type {kind!r} has a stride of {stride}; the first block of a level "
            "must be a convolution with 2, and others have 1"
        )
    return _READERS[kind](written, stride)


def _edge(written: JsonMapping, stride: int) -> EdgeBlock:
    require(written, "pw_kernel_size", 1)
    require(written, "force_in_chs", 0)
    return EdgeBlock(
        _numbers_of(written, "out_chs"),
        _kernel(written, "exp_kernel_size", 3),
        _ratio(written),
        stride,
    )


def _inverted(written: JsonMapping, stride: int) -> InvertedBlock:
    require(written, "dw_kernel_size_end", 0)
    first = _kernel(written, "dw_kernel_size_start", 0)
    kernel = _kernel(written, "dw_kernel_size_mid", 3)
    if stride > 1 and not kernel:
        raise UnsupportedModel("a block with a stride has no dw_kernel_size_mid")
    return InvertedBlock(_numbers_of(written, "out_chs"), first, kernel, _ratio(written), stride)


def _query(written: JsonMapping, stride: int) -> QueryBlock:
    head_dim = size(written, "key_dim", 64)
    require(written, "value_dim", head_dim)
    key_stride = size(written, "kv_stride", 1)
    num_heads = size(written, "num_heads", 8)
    if num_heads * head_dim > MOST_NUMBERS or key_stride > 2:
        raise UnsupportedModel(
            f"a block has {num_heads:,} heads of {head_dim:,} numbers and a kv_stride of "
            f"{key_stride}; up to {MOST_NUMBERS:,} numbers, and a stride up to 2, are supported"
        )
    return QueryBlock(
        _numbers_of(written, "out_chs"),
        num_heads,
        head_dim,
        key_stride,
        _kernel(written, "dw_kernel_size", 3),
        stride,
    )


_READERS: Mapping[str, Callable[[JsonMapping, int], EdgeBlock | InvertedBlock | QueryBlock]] = {
    "er": _edge,
    "uir": _inverted,
    "mqa": _query,
}


def _numbers_of(written: JsonMapping, key: str, default: int | None = None) -> int:
    value = size(written, key, default)
    if value % STEP or value > MOST_NUMBERS:
        raise UnsupportedModel(
            f"{key} is {value:,}; a multiple of {STEP} up to {MOST_NUMBERS:,} is supported"
        )
    return value


def _kernel(written: JsonMapping, key: str, default: int) -> int:
    value = get(written, key, int, default)
    if value and (value % 2 == 0 or not 0 < value <= MAX_KERNEL):
        raise UnsupportedModel(
            f"{key} is {value}; an odd number up to {MAX_KERNEL} is supported, or 0 for none"
        )
    return value


def _ratio(written: JsonMapping) -> int:
    value = number(written, "exp_ratio", 1.0, above=0.0)
    if value != int(value) or value > STEP:
        raise UnsupportedModel(f"exp_ratio is {value:g}; a number from 1 to {STEP} is supported")
    return int(value)
