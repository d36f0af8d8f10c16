"""The pictures of Gemma 3, prepared for its encoder: each is squeezed into a square; with pan and
scan, pieces of the picture become additional squares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weft.config.config_json import get, number, require, size
from weft.config.model import read_json_if_there
from weft.config.vision.pictures import gemma3
from weft.messages.media import MediaKind
from weft.text.media.pixels import (
    BILINEAR,
    Looks,
    Size,
    read_looks,
    require_side,
    side_of,
)
from weft.text.media.processor import Knob, MediaPart, MediaProcessor, PicturesAlone, PreparedMedia
from weft.text.media.processor_files import read_settings

if TYPE_CHECKING:
    from PIL.Image import Image

# The default tokens, for a tokenizer that does not name them.
BEGIN = "<start_of_image>"
SOFT = "<image_soft_token>"
END = "<end_of_image>"
# The names of the fields of `PanAndScan` in transformers.
KNOBS = (
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)


class PanAndScan(NamedTuple):
    """Pan and scan: a picture with one side much longer than the other is also seen in pieces."""

    is_on: bool = False
    min_side: int = 256  # least pixels of a side of a piece
    max_pieces: int = 4
    min_ratio: float = 1.2  # least ratio of the sides of a picture that is encoded in pieces

    def cuts(self, size: Size) -> list[tuple[int, int, int, int]]:
        """Left, top, right and bottom of each piece, in the order of the prompt."""
        longer, shorter = max(size), min(size)
        if not self.is_on or longer / shorter < self.min_ratio:
            return []
        num = min(math.floor(longer / shorter + 0.5), longer // self.min_side)
        num = min(max(num, 2), self.max_pieces)
        step = math.ceil(longer / num)
        if min(step, shorter) < self.min_side:
            return []
        borders = [(begin * step, min((begin + 1) * step, longer)) for begin in range(num)]
        if size.width >= size.height:
            return [(begin, 0, end, size.height) for begin, end in borders]
        return [(0, begin, size.width, end) for begin, end in borders]


class Gemma3Pictures(PicturesAlone):
    """The `MediaProcessor` of Gemma 3. Values are [3, side, side]."""

    def __init__(
        self,
        looks: Looks,
        side: int,
        num_tokens: int,
        names: Mapping[str, str],
        scan: PanAndScan,
    ) -> None:
        begin = names.get("boi_token", BEGIN)
        soft = names.get("image_token", SOFT)
        end = names.get("eoi_token", END)
        self.marks: Mapping[MediaKind, str] = {"image": begin}
        self.placeholders: Mapping[MediaKind, str] = {"image": soft}
        self._looks = looks
        self._size = Size(side, side)
        self._num_tokens = num_tokens
        self._names = names
        self._scan = scan
        self._text = f"\n\n{begin}{soft * num_tokens}{end}\n\n"

    def image(self, image: Image) -> PreparedMedia:
        cuts = self._scan.cuts(Size(image.height, image.width))
        parts = [self._part(image)]
        parts += [self._part(image.crop(cut)) for cut in cuts]
        if not cuts:
            return PreparedMedia(self._text, tuple(parts))
        of_cuts = " ".join([self._text] * len(cuts))
        text = (
            f"Here is the original image {self._text} and here are some crops to help you see "
            f"better {of_cuts}"
        )
        return PreparedMedia(text, tuple(parts))

    def _part(self, image: Image) -> MediaPart:
        values = self._looks.values(np.asarray(self._looks.resized(image, self._size)))
        return MediaPart("image", self._num_tokens, None, values)

    @property
    def knobs(self) -> Mapping[str, Knob]:
        return dict(zip(KNOBS, self._scan, strict=True))

    def adjusted(self, changes: Mapping[str, Knob]) -> Gemma3Pictures:
        values = {**self.knobs, **changes}
        scan = PanAndScan(
            is_on=bool(values[KNOBS[0]]),
            min_side=int(values[KNOBS[1]]),
            max_pieces=int(values[KNOBS[2]]),
            min_ratio=float(values[KNOBS[3]]),
        )
        side = self._size.height
        return Gemma3Pictures(self._looks, side, self._num_tokens, self._names, scan)


def make(folder: Path, config: Mapping[str, Any]) -> MediaProcessor | None:
    """The processor of a model folder whose `config.json` is given; None: it has no encoder. Raises
    ModelError."""
    spec = gemma3(config, out_size=1)
    if spec is None:
        return None
    settings = read_settings(folder)
    require(settings, "do_resize", True)
    side = side_of(settings, "size", spec.encoder.image_size)
    require_side(side, spec.encoder.image_size)
    looks = read_looks(settings, filter=BILINEAR)
    usual = PanAndScan()
    scan = PanAndScan(
        is_on=get(settings, KNOBS[0], bool, usual.is_on),
        min_side=size(settings, KNOBS[1], usual.min_side),
        max_pieces=size(settings, KNOBS[2], usual.max_pieces),
        min_ratio=number(settings, KNOBS[3], usual.min_ratio, above=0.0),
    )
    return Gemma3Pictures(looks, side, spec.num_tokens, special_tokens(folder), scan)


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens in the tokenizer's configuration, by their names."""
    said = read_json_if_there(folder / "tokenizer_config.json")
    # A dictionary of tokens by name, or a list of tokens without names.
    extra = said.get("extra_special_tokens")
    names = {**extra, **said} if isinstance(extra, dict) else said
    return {key: name for key, name in names.items() if isinstance(name, str)}
