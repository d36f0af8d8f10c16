"""The pictures of Gemma 4, prepared for its encoder: the whole picture in its shape, as large as a
budget of tokens allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.config.config_json import get, require, size
from weft.config.model_errors import BadConfig
from weft.config.vision.gemma4 import BUDGETS, USUAL_BUDGET, Gemma4TowerSpec
from weft.config.vision.gemma4_sound import Gemma4SoundSpec, gemma4_towers
from weft.config.vision.gemma4_unified import PatchSpec, WaveSpec, gemma4_unified
from weft.config.vision.joint import JointSpec
from weft.config.vision.spec import TowerSpec
from weft.messages.media import MediaKind
from weft.text.media.gemma3 import special_tokens
from weft.text.media.gemma4_sound import make_sounds, make_waves
from weft.text.media.joint import SeesAndHears
from weft.text.media.pixels import BICUBIC, Looks, Size, read_looks
from weft.text.media.processor import Knob, MediaPart, MediaProcessor, PicturesAlone, PreparedMedia
from weft.text.media.processor_files import read_settings

if TYPE_CHECKING:
    from PIL.Image import Image

# The default tokens, for a tokenizer that does not name them.
BEGIN = "<|image>"
IMAGE = "<|image|>"
END = "<image|>"
BUDGET = "max_soft_tokens"  # the name in transformers


class Gemma4Pictures(PicturesAlone):
    """The `MediaProcessor` of Gemma 4. Values are [3, height, width], from 0 to 1."""

    def __init__(
        self, looks: Looks, token_side: int, budget: int, names: Mapping[str, str]
    ) -> None:
        """`token_side`: pixels of a token's side. `budget`: most tokens of a picture. `names`: the
        special tokens."""
        image = names.get("image_token", IMAGE)
        self.marks: Mapping[MediaKind, str] = {"image": image}
        self.placeholders: Mapping[MediaKind, str] = {"image": image}
        self._looks = looks
        self._side = token_side
        self._budget = budget
        self._names = names

    def image(self, image: Image) -> PreparedMedia:
        rows, columns = tokens_of(
            Size(image.height, image.width),
            self._side,
            self._budget,
        )
        size = Size(rows * self._side, columns * self._side)
        values = self._looks.values(np.asarray(self._looks.resized(image, size)))
        num_tokens = rows * columns
        begin = self._names.get("boi_token", BEGIN)
        end = self._names.get("eoi_token", END)
        text = f"{begin}{self.placeholders['image'] * num_tokens}{end}"
        part = MediaPart(
            "image",
            num_tokens,
            (1, rows, columns),
            values,
        )
        return PreparedMedia(text, (part,))

    @property
    def knobs(self) -> Mapping[str, Knob]:
        return {BUDGET: self._budget}

    def adjusted(self, changes: Mapping[str, Knob]) -> Gemma4Pictures:
        budget = int(changes.get(BUDGET, self._budget))
        if budget not in BUDGETS:
            raise ValueError(f"{BUDGET} is {budget}; it must be one of {_budgets()}")
        return Gemma4Pictures(
            self._looks,
            self._side,
            budget,
            self._names,
        )


def tokens_of(
    actual: Size,
    side: int,
    budget: int,
) -> tuple[int, int]:
    """Rows and columns of tokens of a picture that is made as large as its tokens stay within
    `budget`, in nearly its shape. `side`: pixels of a token's side."""
    # In the order of transformers' operations, so that it is rounded as there.
    factor = math.sqrt(budget * side**2 / (actual.height * actual.width))
    rows = math.floor(factor * actual.height / side)
    columns = math.floor(factor * actual.width / side)
    if rows == 0:
        return 1, min(actual.width // actual.height, budget)
    if columns == 0:
        return min(actual.height // actual.width, budget), 1
    return rows, columns


def make(folder: Path, config: Mapping[str, Any]) -> MediaProcessor | None:
    """The processor of a folder with this `config.json`; None: the model has no encoder. Raises
    ModelError."""
    return _of_towers(folder, gemma4_towers(config, out_size=1))


def make_unified(folder: Path, config: Mapping[str, Any]) -> MediaProcessor | None:
    """The same of the unified form."""
    return _of_towers(folder, gemma4_unified(config, out_size=1))


def _of_towers(folder: Path, towers: TowerSpec | None) -> MediaProcessor | None:
    parts = towers.parts if isinstance(towers, JointSpec) else (towers,)
    sees: MediaProcessor | None = None
    hears: MediaProcessor | None = None
    for part in parts:
        if isinstance(part, Gemma4TowerSpec | PatchSpec):
            sees = _pictures(folder, part)
        elif isinstance(part, Gemma4SoundSpec):
            hears = make_sounds(folder, part)
        elif isinstance(part, WaveSpec):
            hears = make_waves(folder, part)
    if sees is not None and hears is not None:
        return SeesAndHears(sees, hears)
    return sees if hears is None else hears


def _pictures(folder: Path, spec: Gemma4TowerSpec | PatchSpec) -> Gemma4Pictures:
    settings = read_settings(folder)
    for key in ("do_resize", "do_convert_rgb"):
        require(
            settings,
            key,
            True,
        )
    for key, there in (("patch_size", spec.patch_size), ("pooling_kernel_size", spec.pool)):
        value = get(
            settings,
            key,
            int,
            there,
        )
        if value != there:
            raise BadConfig(f"{key} is {value} for pixels, and {there} for the encoder")
    budget = size(
        settings,
        BUDGET,
        USUAL_BUDGET,
    )
    if budget not in BUDGETS:
        raise BadConfig(f"{BUDGET} is {budget}; it must be one of {_budgets()}")
    looks = read_looks(
        {"do_normalize": False, **settings},
        filter=BICUBIC,
        mean=(0.0, 0.0, 0.0),
        deviation=(1.0, 1.0, 1.0),
    )
    return Gemma4Pictures(
        looks,
        spec.token_side,
        budget,
        special_tokens(folder),
    )


def _budgets() -> str:
    return ", ".join(map(str, BUDGETS))
