"""What operators and requests change of processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.text.processor_configs import CUT, gemma3, llava, pixtral, smolvlm
from weft.text.media.adjusted import adjusted, adjusted_within, read_kwargs
from weft.text.media.errors import MediaError
from weft.text.media.families import make_processor
from weft.text.media.processor import MediaProcessor


def qwen(folder: Path, name: str = "Qwen3VL") -> MediaProcessor:
    found = make_processor(folder, {"architectures": [f"{name}ForConditionalGeneration"]})
    assert found is not None
    return found


def num_tokens(processor: MediaProcessor, width: int, height: int) -> int:
    prepared = processor.image(Image.new("RGB", (width, height)))
    return sum(part.length for part in prepared.parts)


def test_pictures_become_smaller_and_larger(tmp_path: Path) -> None:
    usual = qwen(tmp_path)
    small = adjusted(usual, {"max_pixels": 64 * 64})
    by_size = adjusted(usual, {"size": {"longest_edge": 64 * 64}})
    large = adjusted(usual, {"min_pixels": 320 * 320})
    assert num_tokens(usual, 256, 256) == 8 * 8
    assert num_tokens(small, 256, 256) == num_tokens(by_size, 256, 256) == 2 * 2
    assert num_tokens(large, 256, 256) == 10 * 10
    assert num_tokens(adjusted(usual, {}), 256, 256) == 8 * 8
    tiles = smolvlm(tmp_path)
    assert num_tokens(tiles, 300, 300) == (16 + 1) * 4
    assert num_tokens(adjusted(tiles, {"size": {"longest_edge": 112}}), 300, 300) == (4 + 1) * 4
    assert num_tokens(adjusted(tiles, {"do_image_splitting": False}), 300, 300) == 4
    lines = pixtral(tmp_path, size={"longest_edge": 280})
    assert num_tokens(lines, 280, 280) == 20 * 21 - 1
    assert num_tokens(adjusted(lines, {"longest_edge": 140}), 280, 280) == 10 * 11 - 1


def test_requests_make_no_more_work_than_the_server_allows(tmp_path: Path) -> None:
    server = adjusted(qwen(tmp_path), {"max_pixels": 200_000, "min_pixels": 10_000})
    assert num_tokens(adjusted_within(server, {"max_pixels": 64 * 160}), 256, 256) == 9
    assert num_tokens(adjusted_within(server, {"min_pixels": 100_000}), 64, 64) == 10 * 10
    for given, words in [
        ({"max_pixels": 200_001}, "max_pixels is 200001; at most 200000 is allowed"),
        ({"min_pixels": 200_001}, "min_pixels is 200001; at most 200000 is allowed"),
        ({"max_pixels": 5_000}, "min_pixels is 10,000, more than the max_pixels of 5,000"),
        ({"fps": 2.5}, "fps is 2.5; at most 2.0"),
        ({"max_frames": 769}, "max_frames is 769; at most 768"),
    ]:
        with pytest.raises(ValueError, match=words):
            adjusted_within(server, given)
    scanning = adjusted(gemma3(tmp_path), {"do_pan_and_scan": True})
    assert adjusted_within(scanning, {"do_pan_and_scan": False}).knobs["do_pan_and_scan"] is False
    with pytest.raises(MediaError, match="do_pan_and_scan is true; this server has it off"):
        adjusted_within(gemma3(tmp_path), {"do_pan_and_scan": True})
    with pytest.raises(MediaError, match="min_crop_size is 255; at least 256"):
        adjusted_within(scanning, {"pan_and_scan_min_crop_size": 255})
    assert adjusted_within(scanning, {"pan_and_scan_min_crop_size": 300})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_pixel": 1}, "has 'max_pixel'; min_pixels, max_pixels, fps, min_frames, max_frames"),
        ({"max_pixels": "many"}, "max_pixels is 'many'; a whole number above 0"),
        ({"max_pixels": True}, "max_pixels is True; a whole number above 0"),
        ({"max_pixels": 0}, "max_pixels is 0; a whole number above 0"),
        ({"max_pixels": 2.5}, "max_pixels is 2.5; a whole number above 0"),
        ({"fps": float("nan")}, "fps is nan; a number above 0"),
        ({"size": 5}, "size is not an object"),
        ({"size": {"height": 5}}, "has 'height'"),
    ],
)
def test_invalid_parts_are_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    for change in (adjusted, adjusted_within):
        with pytest.raises(MediaError, match=words):
            change(qwen(tmp_path), given)


def test_a_model_with_pictures_of_one_size_has_nothing_to_change(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="nothing can be changed for this model"):
        adjusted(llava(tmp_path, **CUT), {"max_pixels": 5})
    with pytest.raises(MediaError, match="has 'fps'; min_pixels, max_pixels can be changed"):
        adjusted(qwen(tmp_path, "Qwen2_5_VL"), {"fps": 1.0})


def test_settings_are_objects() -> None:
    assert read_kwargs("") == {}
    assert read_kwargs('{"a": 1}') == {"a": 1}
    for text in ("{", "5"):
        with pytest.raises(ValueError, match="is no"):
            read_kwargs(text)
