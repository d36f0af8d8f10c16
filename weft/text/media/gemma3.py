"""What Gemma 3 makes of a picture before its encoder reads it: a square, whatever its shape was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.arrays import FloatArray
from weft.config.config_json import require
from weft.config.model import read_json_if_there
from weft.config.vision.pictures import gemma3
from weft.messages.media import MediaKind
from weft.text.media.pixels import (
    BILINEAR,
    Looks,
    Size,
    read_looks,
    read_settings,
    require_side,
    side_of,
)
from weft.text.media.processor import MediaPart, MediaProcessor, PreparedMedia

if TYPE_CHECKING:
    from PIL.Image import Image

# The tokens of a tokenizer that does not name its own.
BEGIN = "<start_of_image>"
SOFT = "<image_soft_token>"
END = "<end_of_image>"


class Gemma3Pictures:
    """The `MediaProcessor` of Gemma 3. Values are [3, side, side]."""

    def __init__(self, looks: Looks, side: int, num_tokens: int, names: Mapping[str, str]) -> None:
        begin = names.get("boi_token", BEGIN)
        soft = names.get("image_token", SOFT)
        end = names.get("eoi_token", END)
        self.marks: Mapping[MediaKind, str] = {"image": begin}
        self.placeholders: Mapping[MediaKind, str] = {"image": soft}
        self._looks = looks
        self._size = Size(side, side)
        self._num_tokens = num_tokens
        self._text = f"\n\n{begin}{soft * num_tokens}{end}\n\n"

    @property
    def audio_rate(self) -> int:
        return 0

    def image(self, image: Image) -> PreparedMedia:
        values = self._looks.values(np.asarray(self._looks.resized(image, self._size)))
        return PreparedMedia(self._text, (MediaPart("image", self._num_tokens, None, values),))

    def video(self, frames: Sequence[Image], frames_per_s: float) -> PreparedMedia:
        raise ValueError("the model takes no videos")

    def audio(self, samples: FloatArray) -> PreparedMedia:
        raise ValueError("the model takes no audio")


def make(folder: Path, config: Mapping[str, Any]) -> MediaProcessor | None:
    """The processor of a model folder whose `config.json` is given; None: it has no encoder. Raises
    ModelError."""
    spec = gemma3(config, out_size=1)
    if spec is None:
        return None
    settings = read_settings(folder)
    for key, value in (("do_resize", True), ("do_pan_and_scan", False)):
        require(settings, key, value)
    side = side_of(settings, "size", spec.encoder.image_size)
    require_side(side, spec.encoder.image_size)
    looks = read_looks(settings, filter=BILINEAR)
    return Gemma3Pictures(looks, side, spec.num_tokens, _names(folder))


def _names(folder: Path) -> dict[str, str]:
    """The special tokens that a tokenizer names."""
    said = read_json_if_there(folder / "tokenizer_config.json")
    # A dictionary of names, or a list of tokens that have none.
    extra = said.get("extra_special_tokens")
    names = {**extra, **said} if isinstance(extra, dict) else said
    return {key: name for key, name in names.items() if isinstance(name, str)}
