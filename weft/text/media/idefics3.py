"""The pictures of Idefics 3 and SmolVLM, prepared for their encoder: tiles of one size, row by row,
then the whole picture in the size of one tile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.config.config_json import get, require
from weft.config.model_errors import BadConfig
from weft.config.vision.pictures import idefics3
from weft.messages.media import MediaKind
from weft.text.media.pixels import (
    LANCZOS,
    Looks,
    Pixels,
    Size,
    edge_of,
    read_looks,
    require_side,
)
from weft.text.media.processor import Knob, MediaPart, MediaProcessor, PicturesAlone, PreparedMedia
from weft.text.media.processor_files import read_settings

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = "<image>"
AROUND = "<fake_token_around_image>"
OVERVIEW = "<global-img>"
MAX_SIDE = 4_096  # pixels of a picture that is cut into tiles, even if a file allows more


class Idefics3Pictures(PicturesAlone):
    """The `MediaProcessor` of Idefics 3 and SmolVLM. Values are [3, side, side] for each tile."""

    marks: Mapping[MediaKind, str] = {"image": IMAGE}
    placeholders: Mapping[MediaKind, str] = {"image": IMAGE}

    def __init__(
        self, looks: Looks, side: int, num_tokens: int, longest: int, *, splits: bool
    ) -> None:
        """`side`: pixels of a tile's side. `longest`: pixels of the longer side to which a picture
        is resized first. `splits`: whether pictures are cut into tiles."""
        self._looks = looks
        self._tile = Size(side, side)
        self._num_tokens = num_tokens
        self._longest = longest
        self._splits = splits

    def image(self, image: Image) -> PreparedMedia:
        image = self._looks.resized(image, scaled(_size(image), self._longest))
        if not self._splits:
            return self._prepared([np.asarray(self._looks.resized(image, self._tile))], 0)
        side = self._tile.height
        tiled = in_tiles(_size(image), side)
        image = self._looks.resized(image, tiled)
        pixels = np.asarray(image)
        if tiled == self._tile:
            return self._prepared([pixels], 0)
        num_columns = tiled.width // side
        tiles = []
        for top in range(0, tiled.height, side):
            line = pixels[top : top + side]
            tiles += [line[:, left : left + side] for left in range(0, tiled.width, side)]
        tiles.append(np.asarray(self._looks.resized(image, self._tile)))
        return self._prepared(tiles, num_columns)

    def _prepared(self, tiles: list[Pixels], num_columns: int) -> PreparedMedia:
        """The text and parts of the tiles. The last tile is the whole picture; the tiles before it
        form a grid of `num_columns` columns."""
        text = ""
        for tile in range(len(tiles) - 1):
            row, column = divmod(tile, num_columns)
            text += f"{AROUND}<row_{row + 1}_col_{column + 1}>{IMAGE * self._num_tokens}"
            if column + 1 == num_columns:
                text += "\n"
        if text:
            text += "\n"
        text += f"{AROUND}{OVERVIEW}{IMAGE * self._num_tokens}{AROUND}"
        values = map(self._looks.values, tiles)
        parts = [MediaPart("image", self._num_tokens, None, of_tile) for of_tile in values]
        return PreparedMedia(text, tuple(parts))

    @property
    def knobs(self) -> Mapping[str, Knob]:
        return {"longest_edge": self._longest, "do_image_splitting": self._splits}

    def adjusted(self, changes: Mapping[str, Knob]) -> Idefics3Pictures:
        longest = int(changes.get("longest_edge", self._longest))
        if longest > 2 * MAX_SIDE:
            raise ValueError(f"longest_edge is {longest}; at most {2 * MAX_SIDE} is supported")
        return Idefics3Pictures(
            self._looks,
            self._tile.height,
            self._num_tokens,
            longest,
            splits=bool(changes.get("do_image_splitting", self._splits)),
        )


def scaled(actual: Size, longest: int) -> Size:
    """The size of the same shape whose longer side is `longest`, at most `MAX_SIDE`. The shorter
    side is even, unless `MAX_SIDE` limits the size."""
    ratio = actual.width / actual.height
    if actual.width >= actual.height:
        height = int(longest / ratio)
        found = Size(height + height % 2, longest)
    else:
        width = int(longest * ratio)
        found = Size(longest, width + width % 2)
    found = Size(max(found.height, 1), max(found.width, 1))
    if longest <= MAX_SIDE:
        return found
    ratio = found.width / found.height
    if found.width >= found.height:
        found = Size(int(MAX_SIDE / ratio), MAX_SIDE)
    else:
        found = Size(MAX_SIDE, int(MAX_SIDE * ratio))
    return Size(max(found.height, 1), max(found.width, 1))


def in_tiles(actual: Size, side: int) -> Size:
    """The size rounded up to whole tiles."""
    ratio = actual.width / actual.height
    if actual.width >= actual.height:
        width = math.ceil(actual.width / side) * side
        return Size(math.ceil(int(width / ratio) / side) * side, width)
    height = math.ceil(actual.height / side) * side
    return Size(height, math.ceil(int(height * ratio) / side) * side)


def _size(image: Image) -> Size:
    return Size(image.height, image.width)


def make(folder: Path, config: Mapping[str, Any]) -> MediaProcessor | None:
    """The processor of a model folder whose `config.json` is given; None: it has no encoder. Raises
    ModelError."""
    spec = idefics3(config, out_size=1)
    if spec is None:
        return None
    settings = read_settings(folder)
    require(settings, "do_resize", True)
    side = edge_of(settings, "max_image_size", "longest_edge", 364)
    require_side(side, spec.encoder.image_size)
    longest = edge_of(settings, "size", "longest_edge", 4 * 364)
    if longest > 2 * MAX_SIDE:
        raise BadConfig(f"longest_edge is {longest}; at most {2 * MAX_SIDE} is supported")
    return Idefics3Pictures(
        read_looks(settings, filter=LANCZOS),
        side,
        spec.num_tokens,
        longest,
        splits=get(settings, "do_image_splitting", bool, True),
    )
