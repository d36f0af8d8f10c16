"""Pictures as Gemma 3, SmolVLM, Idefics 3 and LLaVA read them, against the processors of
transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import (
    SmolVLMImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from tests.text.processor_configs import (
    CLIP,
    CUT,
    GEMMA4,
    SIGLIP,
    SQUARE,
    TILES,
    gemma3,
    gemma4,
    llava,
    pixtral,
    smolvlm,
)
from weft.config.model_errors import ModelError
from weft.text.media.adjusted import adjusted
from weft.text.media.families import make_processor
from weft.text.media.idefics3 import scaled
from weft.text.media.pixels import Size
from weft.text.media.processor import MediaProcessor

SIZES = [
    (64, 48),
    (13, 9),
    (56, 56),
    (333, 500),
    (400, 30),
    (112, 113),
    (3, 600),
    (1, 1),
    (224, 56),
]


def picture(width: int, height: int) -> Image.Image:
    random = np.random.default_rng(width * height)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def values_of(processor: MediaProcessor, image: Image.Image) -> np.ndarray:
    """[parts, 3, side, side]"""
    prepared = processor.image(image)
    for part in prepared.parts:
        assert part.kind == "image"
        assert part.grid is None
        assert part.values.dtype == np.float32
    placeholders = prepared.text.count(processor.placeholders["image"])
    assert placeholders == sum(part.length for part in prepared.parts)
    return np.stack([part.values for part in prepared.parts])


@pytest.mark.parametrize(
    "settings", [{}, {"resample": 3, "rescale_factor": 0.01, "image_mean": [0.1, 0.2, 0.3]}]
)
def test_gemma_3_squeezes_pictures_into_a_square(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = gemma3(tmp_path, **settings)
    theirs = Gemma3ImageProcessorPil(size=SQUARE, **settings)
    for sides in SIZES:
        image = picture(*sides)
        want = theirs(image, return_tensors="np")["pixel_values"]
        np.testing.assert_array_equal(values_of(ours, image), want)


@pytest.mark.parametrize(
    "settings",
    [
        {"pan_and_scan_min_crop_size": 30},
        {"pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 3},
        {"pan_and_scan_min_crop_size": 9, "pan_and_scan_min_ratio_to_activate": 1.5},
    ],
)
def test_pan_and_scan_is_that_of_gemma_3(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {"do_pan_and_scan": True, **settings}
    usual = {"pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}
    theirs = Gemma3ImageProcessorPil(size=SQUARE, **{**usual, **settings})
    from_file = gemma3(tmp_path, **settings)
    by_knobs = adjusted(gemma3(tmp_path), settings)
    seen = set()
    for sides in [*SIZES, (200, 67), (61, 200), (100, 80)]:
        image = picture(*sides)
        want = theirs(image, return_tensors="np")
        (num,) = want["num_crops"]
        seen.add(int(num))
        for ours in (from_file, by_knobs):
            np.testing.assert_array_equal(values_of(ours, image), want["pixel_values"])
            whole = gemma3(tmp_path).image(image).text
            names = SimpleNamespace(full_image_sequence=whole)
            assert ours.image(image).text == Gemma3Processor.replace_image_token(names, want, 0)
    assert len(seen) > 2


def test_the_text_of_a_picture_is_that_of_gemma_3(tmp_path: Path) -> None:
    tokens = {"boi_token": "<boi>", "image_token": "<soft>", "eoi_token": "<eoi>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    ours = gemma3(tmp_path)
    assert ours.marks["image"] == "<boi>"
    assert ours.placeholders["image"] == "<soft>"
    text = f"\n\n<boi>{'<soft>' * 4}<eoi>\n\n"
    theirs = SimpleNamespace(full_image_sequence=text)
    assert Gemma3Processor.replace_image_token(theirs, {"num_crops": [0]}, 0) == text
    assert ours.image(picture(9, 9)).text == text


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_image_splitting": False},
        {"size": {"longest_edge": 100}, "resample": 2},
        {"size": {"longest_edge": 55}},
    ],
)
def test_tiles_and_their_text_are_those_of_smolvlm(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole = {**TILES, **settings}
    ours = smolvlm(tmp_path, **settings)
    theirs = SmolVLMImageProcessorPil(**whole)
    for sides in SIZES:
        image = picture(*sides)
        want = theirs([[image]], return_tensors="np", return_row_col_info=True)
        assert want["pixel_attention_mask"].all()
        np.testing.assert_array_equal(values_of(ours, image), want["pixel_values"][0])
        names = SimpleNamespace(
            image_seq_len=4,
            fake_image_token="<fake_token_around_image>",
            image_token="<image>",
            global_image_token="<global-img>",
        )
        assert ours.image(image).text == SmolVLMProcessor.replace_image_token(names, want, 0)


def test_sizes_before_tiles_are_those_of_transformers() -> None:
    for width, height in [*SIZES, (1001, 1000), (1000, 1001), (4_000, 4_001)]:
        pixels = np.broadcast_to(np.uint8(0), (3, height, width))
        for longest in (1, 55, 364, 2_047, 2_048, 4_096, 4_201, 8_192):
            want = get_resize_output_image_size(pixels, longest)
            assert scaled(Size(height, width), longest) == want


def test_idefics_3_is_read_as_smolvlm(tmp_path: Path) -> None:
    ours = smolvlm(tmp_path, "Idefics3")
    image = picture(300, 200)
    want = Idefics3ImageProcessorPil(**TILES)(
        [[image]], return_tensors="np", return_row_col_info=True
    )
    np.testing.assert_array_equal(values_of(ours, image), want["pixel_values"][0])
    names = SimpleNamespace(
        image_seq_len=4,
        fake_image_token="<fake_token_around_image>",
        image_token="<image>",
        global_image_tag="<global-img>",
    )
    assert ours.image(image).text == Idefics3Processor.replace_image_token(names, want, 0)


NOT_TOO_NARROW = [sides for sides in SIZES if max(sides) <= 200 * min(sides)]


@pytest.mark.parametrize(
    ("theirs", "settings"),
    [
        (CLIPImageProcessorPil, CUT),
        (CLIPImageProcessorPil, {**CUT, "size": {"shortest_edge": 61}, "do_normalize": False}),
        (LlavaImageProcessorPil, CUT),
        (LlavaImageProcessorPil, {**CUT, "do_pad": True}),
        (SiglipImageProcessorPil, {"size": SQUARE}),
    ],
)
def test_squares_are_those_of_llava(tmp_path: Path, theirs: Any, settings: dict[str, Any]) -> None:
    kind = theirs.__name__.removesuffix("Pil")
    vision = SIGLIP if theirs is SiglipImageProcessorPil else CLIP
    ours = llava(tmp_path, vision, image_processor_type=kind, **settings)
    processor = theirs(**settings)
    for sides in NOT_TOO_NARROW:
        image = picture(*sides)
        want = processor(image, return_tensors="np")["pixel_values"]
        np.testing.assert_array_equal(values_of(ours, image), want)


def test_llava_has_a_placeholder_for_each_patch(tmp_path: Path) -> None:
    ours = llava(tmp_path, **CUT)
    image = picture(80, 60)
    names = SimpleNamespace(
        image_token="<image>",
        patch_size=14,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    inputs = {"pixel_values": values_of(ours, image)}
    assert ours.image(image).text == LlavaProcessor.replace_image_token(names, inputs, 0)


def test_a_picture_that_would_take_much_memory_is_refused(tmp_path: Path) -> None:
    ours = llava(tmp_path, **CUT)
    for sides in ((402, 2), (2, 402)):
        with pytest.raises(ValueError, match="at most 200 times"):
            ours.image(picture(*sides))


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (gemma3, {"size": {"height": 56, "width": 28}}, "height and width of a square"),
        (
            gemma3,
            {"size": {"height": 28, "width": 28}},
            "28 x 28 pixels, and the encoder reads 56 x 56",
        ),
        (gemma3, {"image_std": [1.0, 0.0, 1.0]}, "no number may be 0"),
        (gemma3, {"image_mean": [1.0]}, "must be 3 numbers"),
        (gemma3, {"image_std": [0.5, 0.5, float("nan")]}, "must be 3 numbers"),
        (gemma3, {"resample": 9}, "resample is 9"),
        (gemma4, {"max_soft_tokens": 100}, "must be one of 70, 140, 280, 560, 1120"),
        (gemma4, {"patch_size": 8}, "patch_size is 8 for pixels, and 4 for the encoder"),
        (gemma4, {"do_resize": False}, "do_resize is False; only True"),
        (smolvlm, {"size": {"height": 224}}, "longest_edge alone is expected"),
        (smolvlm, {"size": {"longest_edge": 100_000}}, "at most 8192"),
        (smolvlm, {"max_image_size": {"longest_edge": 84}}, "84 x 84 pixels"),
        (llava, {**CUT, "do_pad": True}, "do_pad is true"),
        (llava, {**CUT, "size": {"shortest_edge": 55}}, "less than the 56"),
        (llava, {**CUT, "image_processor_type": "PixtralImageProcessor"}, "supported are CLIP"),
    ],
)
def test_settings_that_cannot_be_followed_are_named(
    tmp_path: Path, make: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, **settings)


@pytest.mark.parametrize("name", ["Gemma3", "Gemma4", "SmolVLM", "Llava"])
def test_a_model_without_an_encoder_has_no_processor(tmp_path: Path, name: str) -> None:
    assert make_processor(tmp_path, {"architectures": [f"{name}ForConditionalGeneration"]}) is None


@pytest.mark.parametrize("make", [gemma3, gemma4, smolvlm])
def test_videos_and_sounds_are_refused(tmp_path: Path, make: Any) -> None:
    processor = make(tmp_path)
    assert set(processor.marks) == {"image"}
    assert processor.audio_rate == 0
    with pytest.raises(ValueError, match="no videos"):
        processor.video([picture(9, 9)], 1.0)
    with pytest.raises(ValueError, match="no audio"):
        processor.audio(np.zeros(9, np.float32))


@pytest.mark.parametrize(("name", "side"), [("Mistral3", 14), ("Llava", 7)])
def test_lines_and_their_text_are_those_of_pixtral(tmp_path: Path, name: str, side: int) -> None:
    ours = pixtral(tmp_path, name, size={"longest_edge": 100})
    theirs = PixtralImageProcessorPil(size={"longest_edge": 100}, patch_size=side)
    for sides in SIZES:
        if max(sides) > 100 * min(sides):
            with pytest.raises(ValueError, match="at most 100 times as long"):
                ours.image(picture(*sides))
            continue
        prepared = ours.image(picture(*sides))
        want = theirs(picture(*sides), return_tensors="np")
        (part,) = prepared.parts
        np.testing.assert_array_equal(part.values[None], want["pixel_values"])
        # As `PixtralProcessor.replace_image_token` says, which needs torchvision.
        ((height, width),) = want["image_sizes"]
        line = ["[IMG]"] * (width // side)
        lines = [*line, "[IMG_BREAK]"] * (height // side)
        assert prepared.text == "".join([*lines[:-1], "[IMG_END]"])
        assert part.length == len(lines) - 1
        assert part.grid == (1, height // side, width // side)
        assert part.line_len == width // side


def test_pixtral_reads_what_its_encoder_reads(tmp_path: Path) -> None:
    said = {"patch_size": 7, "spatial_merge_size": 4, "image_token": "<i>"}
    (tmp_path / "processor_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match="spatial_merge_size is 4 for pixels, and 2 for"):
        pixtral(tmp_path)
    said["spatial_merge_size"] = 2
    (tmp_path / "processor_config.json").write_text(json.dumps(said))
    assert pixtral(tmp_path).marks == {"image": "<i>"}
    with pytest.raises(ModelError, match="at most 16384"):
        pixtral(tmp_path, size={"longest_edge": 20_000})


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_soft_tokens": 70, "resample": 2, "do_normalize": True, "image_mean": [0.1] * 3}],
)
def test_pictures_have_the_shape_and_the_text_of_gemma_4(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    ours = gemma4(tmp_path, **settings)
    theirs = Gemma4ImageProcessorPil(**{**GEMMA4, **settings})
    names = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
    for sides in [*SIZES, (1_000, 2), (2, 1_000)]:
        want = theirs(picture(*sides), return_tensors="np")
        prepared = ours.image(picture(*sides))
        (part,) = prepared.parts
        assert prepared.text == Gemma4Processor.replace_image_token(names, want, 0)
        assert part.grid is not None
        _, rows, columns = part.grid
        assert part.length == rows * columns == want["num_soft_tokens_per_image"][0]
        cut = part.values.reshape(3, 2 * rows, 4, 2 * columns, 4).transpose(1, 3, 2, 4, 0)
        patches = cut.reshape(4 * part.length, -1)
        np.testing.assert_array_equal(patches, want["pixel_values"][0, : len(patches)])
        last = want["image_position_ids"][0, len(patches) - 1]
        assert last.tolist() == [2 * columns - 1, 2 * rows - 1]
    assert adjusted(ours, {"max_soft_tokens": 140}).image(picture(90, 90)).parts[0].length == 121
    with pytest.raises(ValueError, match="max_soft_tokens is 71; it must be one of 70"):
        adjusted(ours, {"max_soft_tokens": 71})
