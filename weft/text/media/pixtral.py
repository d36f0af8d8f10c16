"""The pictures of Pixtral, and of Mistral from Small 3.1 on, prepared for their encoder: the whole
picture in its shape, as rows of tokens, with a text token after each row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.config.config_json import get, require
from weft.config.model import read_json_if_there
from weft.config.model_errors import BadConfig
from weft.config.vision.pixtral import PixtralSpec, mistral3
from weft.messages.media import MediaKind
from weft.text.media.pixels import (
    BICUBIC,
    CLIP_DEVIATION,
    CLIP_MEAN,
    Looks,
    Size,
    edge_of,
    read_looks,
)
from weft.text.media.processor import Knob, MediaPart, MediaProcessor, PicturesAlone, PreparedMedia
from weft.text.media.processor_files import read_settings

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = "[IMG]"
BREAK = "[IMG_BREAK]"
END = "[IMG_END]"
MAX_EDGE = 16_384  # pixels of a picture's longer edge, even if a file allows more


class PixtralPictures(PicturesAlone):
    """The `MediaProcessor` of Pixtral. Values are [3, height, width]."""

    def __init__(
        self, looks: Looks, longest: int, token_side: int, names: tuple[str, str, str]
    ) -> None:
        """`longest`: most pixels of a picture's edge. `token_side`: pixels of a token's side.
        `names`: the tokens of the image, after each row but the last, and after the last row."""
        image, self._break, self._end = names
        self.marks: Mapping[MediaKind, str] = {"image": image}
        self.placeholders: Mapping[MediaKind, str] = {"image": image}
        self._image = image
        self._looks = looks
        self._longest = longest
        self._side = token_side

    def image(self, image: Image) -> PreparedMedia:
        rows, columns = tokens_of(Size(image.height, image.width), self._longest, self._side)
        size = Size(rows * self._side, columns * self._side)
        values = self._looks.values(np.asarray(self._looks.resized(image, size)))
        line = self._image * columns
        text = self._break.join([line] * rows) + self._end
        # The part ends before the end token, and includes the breaks between two rows.
        part = MediaPart(
            "image",
            rows * (columns + 1) - 1,
            (1, rows, columns),
            values,
            line_len=columns,
        )
        return PreparedMedia(text, (part,))

    @property
    def knobs(self) -> Mapping[str, Knob]:
        return {"longest_edge": self._longest}

    def adjusted(self, changes: Mapping[str, Knob]) -> PixtralPictures:
        longest = int(changes.get("longest_edge", self._longest))
        if longest > MAX_EDGE:
            raise ValueError(f"longest_edge is {longest}; at most {MAX_EDGE} is supported")
        names = (self._image, self._break, self._end)
        return PixtralPictures(self._looks, longest, self._side, names)


def tokens_of(actual: Size, longest: int, side: int) -> tuple[int, int]:
    """Rows and columns of tokens of a picture, which is first scaled down if an edge is longer than
    `longest`. `side`: pixels of a token's side. Raises ValueError for a too narrow picture."""
    ratio = max(actual) / longest
    height, width = actual
    if ratio > 1:
        height = math.floor(height / ratio)
        width = math.floor(width / ratio)
    if min(height, width) < 1:
        raise ValueError(
            f"it has {actual.width} x {actual.height} pixels; one side may be at most {longest:,} "
            "times as long as the other"
        )
    return -(-height // side), -(-width // side)


def make_of(folder: Path, spec: PixtralSpec) -> MediaProcessor:
    """The processor of a model folder with a Pixtral encoder. Raises ModelError."""
    settings = read_settings(folder)
    for key in ("do_resize", "do_convert_rgb"):
        require(settings, key, True)
    require(settings, "do_center_crop", False)
    longest = edge_of(settings, "size", "longest_edge", 1_024)
    if longest > MAX_EDGE:
        raise BadConfig(f"longest_edge is {longest}; at most {MAX_EDGE} is supported")
    said = read_json_if_there(folder / "processor_config.json")
    for key, there in (
        ("patch_size", spec.patch_size),
        ("spatial_merge_size", max(spec.merge_size, 1)),
    ):
        value = get(said, key, int, there)
        if value != there:
            raise BadConfig(f"{key} is {value} for pixels, and {there} for the encoder")
    names = (
        get(said, "image_token", str, IMAGE),
        get(said, "image_break_token", str, BREAK),
        get(said, "image_end_token", str, END),
    )
    looks = read_looks(settings, filter=BICUBIC, mean=CLIP_MEAN, deviation=CLIP_DEVIATION)
    return PixtralPictures(looks, longest, spec.token_side, names)


def make(folder: Path, config: Mapping[str, Any]) -> MediaProcessor | None:
    """The processor of a model folder whose `config.json` is given; None: it has no encoder. Raises
    ModelError."""
    spec = mistral3(config, out_size=1)
    return None if spec is None else make_of(folder, spec)
