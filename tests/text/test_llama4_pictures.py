"""Pictures as Llama 4 reads them. The processor of transformers needs a package that tests do not
have: its canvases are written down here, and its text is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.llama4.processing_llama4 import Llama4Processor

from tests.text.processor_configs import made
from weft.config.model_errors import ModelError
from weft.text.media.adjusted import adjusted
from weft.text.media.pixels import to_bfloat16
from weft.text.media.processor import MediaProcessor

VISION = {
    **{"image_size": 32, "patch_size": 8, "hidden_size": 48, "num_attention_heads": 3},
    **{"intermediate_size": 192, "projector_input_dim": 40, "projector_output_dim": 40},
    "vision_output_dim": 40,
}
NUM_TOKENS = 4
# Width and height → rows and columns of tiles; of at most 5 tiles that pictures are enlarged to.
CANVASES = {
    (64, 48): ((2, 2), (2, 2)),
    (13, 9): ((1, 1), (2, 2)),
    (333, 500): ((5, 3), (2, 2)),
    (400, 30): ((1, 13), (1, 5)),
    (3, 600): ((16, 1), (5, 1)),
    (224, 56): ((2, 7), (1, 4)),
    (97, 31): ((1, 4), (1, 4)),
    (40, 90): ((3, 2), (3, 1)),
    (1, 1): ((1, 1), (2, 2)),
}


def llama4(folder: Path, **settings: Any) -> MediaProcessor:
    return made(folder, "Llama4", VISION, {"size": {"height": 32, "width": 32}, **settings})


def picture(width: int, height: int) -> Image.Image:
    random = np.random.default_rng(width * height)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", CANVASES)
def test_canvas_and_text_are_those_of_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    usual = llama4(tmp_path)
    few = adjusted(usual, {"max_patches": 5, "resize_to_max_canvas": True})
    for processor, (rows, columns) in zip((usual, few), CANVASES[size], strict=True):
        prepared = processor.image(picture(*size))
        num_tiles = rows * columns
        assert len(prepared.parts) == num_tiles + (num_tiles > 1)
        assert {part.values.shape for part in prepared.parts} == {(3, 32, 32)}
        assert {part.length for part in prepared.parts} == {NUM_TOKENS}
        wanted = Llama4Processor._prompt_split_image(None, (rows, columns), NUM_TOKENS)
        assert prepared.text == wanted


def test_tiles_are_the_picture_row_by_row_then_the_whole_of_it(tmp_path: Path) -> None:
    """A picture that needs no resizing; what it does not fill is black."""
    image = picture(64, 40)
    parts = llama4(tmp_path).image(image).parts
    exact = np.asarray(image, np.float32).transpose(2, 0, 1) * np.float32(1 / 255)
    pixels = 2 * to_bfloat16(to_bfloat16(exact) - np.float32(0.5))
    assert np.array_equal(parts[0].values, pixels[:, :32, :32])
    assert np.array_equal(parts[1].values, pixels[:, :32, 32:])
    assert np.array_equal(parts[3].values[:, :8], pixels[:, 32:, 32:])
    assert (parts[3].values[:, 8:] == -1).all()
    small = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR))
    assert np.abs(parts[4].values - (small.transpose(2, 0, 1) / 127.5 - 1)).max() < 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_resize": False}, "do_resize is False"),
        ({"size": {"height": 64, "width": 64}}, "64 x 64 pixels, and the encoder reads 32 x 32"),
        ({"max_patches": 65}, "max_patches is 65; at most 64"),
    ],
)
def test_settings_that_cannot_be_followed_are_named(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        llama4(tmp_path, **settings)
    with pytest.raises(ValueError, match="max_patches is 0"):
        adjusted(llama4(tmp_path), {"max_patches": 0})
