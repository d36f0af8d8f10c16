"""The pictures of LLaVA, prepared for its encoder: a square from the middle, or, in some
checkpoints, the whole picture padded to a square or squeezed into one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.config.config_json import get, require
from weft.config.model_errors import BadConfig
from weft.config.vision.pictures import llava
from weft.config.vision.pixtral import PixtralSpec
from weft.messages.media import MediaKind
from weft.text.media import pixtral
from weft.text.media.pixels import (
    BICUBIC,
    CLIP_DEVIATION,
    CLIP_MEAN,
    Looks,
    Size,
    edge_of,
    read_looks,
    require_side,
    side_of,
)
from weft.text.media.processor import Knob, MediaPart, MediaProcessor, PicturesAlone, PreparedMedia
from weft.text.media.processor_files import read_settings

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = "<image>"
MAX_PADDED_SIDE = 8_192  # of a picture that is padded to a square: 256 MB
MAX_RATIO = 200  # of the sides of a picture; the longer side is cropped


class LlavaPictures(PicturesAlone):
    """The `MediaProcessor` of LLaVA. Values are [3, side, side]."""

    marks: Mapping[MediaKind, str] = {"image": IMAGE}
    placeholders: Mapping[MediaKind, str] = {"image": IMAGE}

    def __init__(
        self, looks: Looks, side: int, num_tokens: int, *, shortest: int = 0, pads: bool = False
    ) -> None:
        """`side`: pixels of the square that the encoder reads. `shortest`: length of the shorter
        side before the square is cropped from the middle; 0: pictures are squeezed into the square.
        `pads`: pictures are first padded to a square, in the mean colour."""
        self._looks = looks
        self._size = Size(side, side)
        self._num_tokens = num_tokens
        self._shortest = shortest
        self._pads = pads

    def image(self, image: Image) -> PreparedMedia:
        if max(image.size) > MAX_RATIO * min(image.size):
            raise ValueError(
                f"it has {image.width} x {image.height} pixels; one side may be at most "
                f"{MAX_RATIO} times as long as the other"
            )
        if self._pads:
            image = self._padded(image)
        values = self._looks.values(np.asarray(self._square(image)))
        return PreparedMedia(
            IMAGE * self._num_tokens, (MediaPart("image", self._num_tokens, None, values),)
        )

    def _square(self, image: Image) -> Image:
        if not self._shortest:
            return self._looks.resized(image, self._size)
        longest = int(self._shortest * max(image.size) / min(image.size))
        size = Size(self._shortest, longest)
        if image.width <= image.height:
            size = Size(longest, self._shortest)
        image = self._looks.resized(image, size)
        top = (size.height - self._size.height) // 2
        left = (size.width - self._size.width) // 2
        return image.crop((left, top, left + self._size.width, top + self._size.height))

    def _padded(self, image: Image) -> Image:
        from PIL import Image as images

        side = max(image.size)
        if side > MAX_PADDED_SIDE:
            raise ValueError(
                f"it has {image.width} x {image.height} pixels, and this model pads pictures to a "
                f"square; one side may have at most {MAX_PADDED_SIDE:,}"
            )
        colour = tuple(int(mean * 255) for mean in self._looks.mean)
        square = images.new("RGB", (side, side), colour)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square

    @property
    def knobs(self) -> Mapping[str, Knob]:
        return {}

    def adjusted(self, changes: Mapping[str, Knob]) -> LlavaPictures:
        assert not changes, "it has no knobs"
        return self


def make(folder: Path, config: Mapping[str, Any]) -> MediaProcessor | None:
    """The processor of a model folder whose `config.json` is given; None: it has no encoder. Raises
    ModelError."""
    spec = llava(config, out_size=1)
    if spec is None:
        return None
    if isinstance(spec, PixtralSpec):
        return pixtral.make_of(folder, spec)
    settings = read_settings(folder)
    require(settings, "do_resize", True)
    side = spec.encoder.image_size
    kind = get(settings, "image_processor_type", str, "CLIPImageProcessor")
    kind = kind.removesuffix("Fast").removesuffix("Pil")
    if kind == "SiglipImageProcessor":
        require_side(side_of(settings, "size", 224), side)
        return LlavaPictures(read_looks(settings, filter=BICUBIC), side, spec.num_tokens)
    if kind not in ("CLIPImageProcessor", "LlavaImageProcessor"):
        raise BadConfig(
            f"image_processor_type is {kind[:64]!r}; supported are CLIPImageProcessor, "
            "LlavaImageProcessor and SiglipImageProcessor"
        )
    pads = get(settings, "do_pad", bool, False)
    if pads and kind != "LlavaImageProcessor":
        raise BadConfig(f"do_pad is true, which {kind} does in a way that is not supported")
    require(settings, "do_center_crop", True)
    require_side(_side_of_crop(settings), side)
    shortest = edge_of(settings, "size", "shortest_edge", 224)
    if shortest < side:
        raise BadConfig(f"shortest_edge is {shortest}, less than the {side} that are cut out")
    looks = read_looks(settings, filter=BICUBIC, mean=CLIP_MEAN, deviation=CLIP_DEVIATION)
    return LlavaPictures(looks, side, spec.num_tokens, shortest=shortest, pads=pads)


def _side_of_crop(settings: Mapping[str, Any]) -> int:
    """The side of the cropped square. Older files have a single number."""
    crop = settings.get("crop_size")
    if type(crop) is int:
        return crop
    return side_of(settings, "crop_size", 224)
