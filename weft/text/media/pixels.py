"""Sizes and pixel values of pictures, common to all media processors: resizing and normalization.

The results are bitwise equal to those of transformers' processors that use Pillow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from weft.arrays import FloatArray
from weft.config.config_json import get, number
from weft.config.model_errors import BadConfig
from weft.json_types import JsonMapping

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]  # [height, width, 3]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # filters, by Pillow's numbers
NUM_FILTERS = 6


class Size(NamedTuple):
    """In pixels."""

    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Looks:
    """How pictures are resized and their pixels normalized."""

    filter: int  # Pillow's number of the filter
    mean: tuple[float, ...]  # [3] the mean of each colour, between 0 and 1
    # [3, 256] float32: the normalized number of each value of each colour
    table: FloatArray

    def resized(self, image: Image, size: Size) -> Image:
        return image.resize((size.width, size.height), resample=self.filter)

    def values(self, pixels: Pixels) -> FloatArray:
        """[height, width, 3] -> [3, height, width], float32"""
        return np.stack([of[pixels[:, :, colour]] for colour, of in enumerate(self.table)])


def read_looks(
    settings: JsonMapping,
    *,
    filter: int,
    mean: tuple[float, ...] = HALF,
    deviation: tuple[float, ...] = HALF,
    rounded: Callable[[FloatArray], FloatArray] = np.asarray,
) -> Looks:
    """The filter and normalization in a model's settings. The arguments are the defaults of its
    family; `rounded`: what is done to the result of each step. Raises BadConfig."""
    filter = get(settings, "resample", int, filter)
    if not 0 <= filter < NUM_FILTERS:
        raise BadConfig(f"resample is {filter}; filters of Pillow are 0 to {NUM_FILTERS - 1}")
    mean = _colours(settings, "image_mean", mean)
    deviation = _colours(settings, "image_std", deviation)
    if 0 in deviation:
        raise BadConfig(f"image_std is {deviation}; no number may be 0")
    values = np.arange(256, dtype=np.float64)
    if get(settings, "do_rescale", bool, True):
        values *= number(settings, "rescale_factor", 1 / 255, above=0.0)
    table = rounded(np.repeat(values.astype(np.float32)[None], 3, axis=0))
    if get(settings, "do_normalize", bool, True):
        # In float32, like all later steps.
        table = rounded(table - rounded(np.array(mean, np.float32))[:, None])
        table = rounded(table / rounded(np.array(deviation, np.float32))[:, None])
    return Looks(filter=filter, mean=mean, table=table)


def to_bfloat16(values: FloatArray) -> FloatArray:
    """The nearest numbers of bfloat16; of two, the even one."""
    bits = values.astype(np.float32).view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    bits = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def side_of(settings: JsonMapping, key: str, default: int) -> int:
    """The side of a square, from a key with equal height and width. Raises BadConfig."""
    sides = get(settings, key, dict, {"height": default, "width": default})
    side = sides.get("height")
    if set(sides) != {"height", "width"} or sides["width"] != side or type(side) is not int:
        raise BadConfig(
            f"{key} is {str(sides)[:64]}; the height and width of a square are expected"
        )
    return side


def edge_of(settings: JsonMapping, key: str, edge: str, default: int) -> int:
    """The length of the one edge (longest_edge or shortest_edge) in a key. Raises BadConfig."""
    edges = get(settings, key, dict, {edge: default})
    length = edges.get(edge)
    if set(edges) != {edge} or type(length) is not int or length < 1:
        raise BadConfig(f"{key} is {str(edges)[:64]}; {edge} alone is expected, at least 1")
    return length


def require_side(side: int, encoder_side: int) -> None:
    if side != encoder_side:
        raise BadConfig(
            f"pictures are resized to {side} x {side} pixels, and the encoder reads "
            f"{encoder_side} x {encoder_side}"
        )


def _colours(settings: JsonMapping, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = settings.get(key, list(default))
    if isinstance(values, int | float):
        values = [values] * 3
    if (
        not isinstance(values, list)
        or len(values) != 3
        or not all(isinstance(one, int | float) and abs(one) < 1e30 for one in values)
    ):
        raise BadConfig(f"{key} is {str(values)[:64]}; it must be 3 numbers")
    return tuple(map(float, values))
