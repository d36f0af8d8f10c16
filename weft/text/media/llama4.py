"""The pictures of Llama 4, prepared for its encoder: tiles of one size on a canvas that fits the
picture's shape, row by row, then the whole picture in the size of one tile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.config.config_json import get, require, size
from weft.config.model_errors import BadConfig
from weft.config.vision.llama4 import llama4
from weft.messages.media import MediaKind
from weft.text.media.pixels import (
    BILINEAR,
    Looks,
    Pixels,
    Size,
    read_looks,
    require_side,
    side_of,
    to_bfloat16,
)
from weft.text.media.processor import Knob, MediaPart, MediaProcessor, PicturesAlone, PreparedMedia
from weft.text.media.processor_files import read_settings

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = "<|image|>"
PATCH = "<|patch|>"
BEGIN = "<|image_start|>"
END = "<|image_end|>"
NEXT_COLUMN = "<|tile_x_separator|>"
NEXT_ROW = "<|tile_y_separator|>"
TILES = "max_patches"  # the name in transformers
USUAL_TILES = 16
MOST_TILES = 64


class Llama4Pictures(PicturesAlone):
    """The `MediaProcessor` of Llama 4. Values are [3, side, side] for each tile."""

    marks: Mapping[MediaKind, str] = {"image": IMAGE}
    placeholders: Mapping[MediaKind, str] = {"image": PATCH}

    def __init__(
        self, looks: Looks, side: int, num_tokens: int, most_tiles: int, *, enlarges: bool
    ) -> None:
        """`side`: pixels of a tile's side. `enlarges`: whether pictures are made as large as the
        tiles allow."""
        self._looks = looks
        self._tile = Size(side, side)
        self._num_tokens = num_tokens
        self._most_tiles = most_tiles
        self._enlarges = enlarges

    def image(self, image: Image) -> PreparedMedia:
        side = self._tile.height
        actual = Size(image.height, image.width)
        canvas = best_canvas(actual, canvases(self._most_tiles, side), largest=self._enlarges)
        bounds = canvas
        if not self._enlarges:
            bounds = Size(
                min(max(actual.height, side), canvas.height),
                min(max(actual.width, side), canvas.width),
            )
        resized = np.asarray(self._looks.resized(image, within(actual, bounds, canvas)))
        pixels: Pixels = np.zeros((*canvas, 3), np.uint8)
        pixels[: resized.shape[0], : resized.shape[1]] = resized
        tiles = []
        for top in range(0, canvas.height, side):
            line = pixels[top : top + side]
            tiles += [line[:, left : left + side] for left in range(0, canvas.width, side)]
        if len(tiles) > 1:
            tiles.append(np.asarray(self._looks.resized(image, self._tile)))
        return self._prepared(tiles, canvas.width // side)

    def _prepared(self, tiles: list[Pixels], num_columns: int) -> PreparedMedia:
        """The text and parts of the tiles. The last tile is the whole picture; the tiles before it
        form a grid of `num_columns` columns."""
        patches = PATCH * self._num_tokens
        line = NEXT_COLUMN.join([patches] * num_columns) + NEXT_ROW
        num_lines = (len(tiles) - 1) // num_columns
        text = f"{BEGIN}{line * num_lines}{IMAGE}{patches}{END}"
        values = map(self._looks.values, tiles)
        parts = [MediaPart("image", self._num_tokens, None, of_tile) for of_tile in values]
        return PreparedMedia(text, tuple(parts))

    @property
    def knobs(self) -> Mapping[str, Knob]:
        return {TILES: self._most_tiles, "resize_to_max_canvas": self._enlarges}

    def adjusted(self, changes: Mapping[str, Knob]) -> Llama4Pictures:
        most_tiles = int(changes.get(TILES, self._most_tiles))
        if not 1 <= most_tiles <= MOST_TILES:
            raise ValueError(f"{TILES} is {most_tiles}; 1 to {MOST_TILES} are supported")
        return Llama4Pictures(
            self._looks,
            self._tile.height,
            self._num_tokens,
            most_tiles,
            enlarges=bool(changes.get("resize_to_max_canvas", self._enlarges)),
        )


def canvases(most_tiles: int, side: int) -> list[Size]:
    """The sizes of all rectangles of at most so many tiles. In the order of transformers, those of
    one shape together: of canvases that fit as well, the first is taken."""
    by_shape: dict[float, list[Size]] = {}
    for num in range(most_tiles, 0, -1):
        for rows in range(1, num + 1):
            columns, rest = divmod(num, rows)
            if not rest:
                found = by_shape.setdefault(rows / columns, [])
                found.append(Size(rows * side, columns * side))
    return [canvas for found in by_shape.values() for canvas in found]


def best_canvas(actual: Size, possible: Sequence[Size], *, largest: bool) -> Size:
    """The canvas for which a picture is enlarged least (most: `largest`), or else is reduced least;
    of several, the smallest one."""
    # In float32, as in transformers: scales that are nearly equal count as equal.
    sizes = np.array(possible, np.float32)
    scales = (sizes / np.array(actual, np.float32)).min(1)
    enlarged = scales[scales >= 1]
    if not len(enlarged):
        chosen = scales.max()
    else:
        chosen = enlarged.max() if largest else enlarged.min()
    fitting = [size for size, scale in zip(possible, scales, strict=True) if scale == chosen]
    return min(fitting, key=lambda size: size.height * size.width)


def within(actual: Size, bounds: Size, canvas: Size) -> Size:
    """The largest size of the picture's shape within `bounds`, which are at most `canvas`."""
    # transformers computes in float32 with a bound that is the canvas's.
    wide, high = (
        float(np.float32(bound) / np.float32(own)) if bound == most and bound < own else bound / own
        for own, bound, most in (
            (actual.width, bounds.width, canvas.width),
            (actual.height, bounds.height, canvas.height),
        )
    )
    if wide < high:
        found = Size(min(math.floor(actual.height * wide), bounds.height), bounds.width)
    else:
        found = Size(bounds.height, min(math.floor(actual.width * high), bounds.width))
    return Size(max(found.height, 1), max(found.width, 1))


def make(folder: Path, config: Mapping[str, Any]) -> MediaProcessor | None:
    """The processor of a folder with this `config.json`; None: the model has no encoder. Raises
    ModelError."""
    spec = llama4(config, out_size=1)
    if spec is None:
        return None
    settings = read_settings(folder)
    require(settings, "do_resize", True)
    side = side_of(settings, "size", spec.image_size)
    require_side(side, spec.image_size)
    most_tiles = size(settings, TILES, USUAL_TILES)
    if most_tiles > MOST_TILES:
        raise BadConfig(f"{TILES} is {most_tiles}; at most {MOST_TILES} are supported")
    return Llama4Pictures(
        read_looks(settings, filter=BILINEAR, rounded=to_bfloat16),
        side,
        spec.num_tokens,
        most_tiles,
        enlarges=get(settings, "resize_to_max_canvas", bool, False),
    )
