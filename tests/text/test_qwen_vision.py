"""Pictures and videos as the models of Qwen read them, against the processors of transformers."""

from __future__ import annotations
import __future__

import ast
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from weft.config.model_errors import ModelError
from weft.text.media.families import make_processor
from weft.text.media.qwen import IMAGE, VIDEO, QwenVision, make_qwen3_vl, sampled_frames

VISION = {"patch_size": 14, "tokens_per_second": 2}
VISION_3 = {"patch_size": 16}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SMALL = {"min_pixels": 4 * 28 * 28, "max_pixels": 16 * 28 * 28}
OF_3 = {**HALVES, "patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 30_000}}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def made(
    folder: Path, image: dict[str, Any], vision: dict[str, Any] = VISION, **video: Any
) -> QwenVision:
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    if video:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    name = "Qwen3VL" if vision["patch_size"] == 16 else "Qwen2_5_VL"
    config = {"architectures": [f"{name}ForConditionalGeneration"], "vision_config": vision}
    processor = make_processor(folder, config)
    assert isinstance(processor, QwenVision)
    return processor


SIZES = [(64, 48), (13, 9), (30, 400), (333, 500), (1000, 30), (56, 56), (28, 84), (3, 600)]


@pytest.mark.parametrize("settings", [SMALL, {}, {"size": {"shortest_edge": 1, "longest_edge": 9}}])
@pytest.mark.parametrize("of_3", [False, True])
def test_patches_are_those_of_transformers_bit_for_bit(
    tmp_path: Path, settings: dict[str, Any], of_3: bool
) -> None:
    if of_3:
        settings = {**settings, **HALVES, "patch_size": 16}
    ours = made(tmp_path, settings, VISION_3 if of_3 else VISION)
    expected = Qwen2VLImageProcessorPil(**settings)
    for width, height in SIZES:
        image = picture(width, height)
        want = expected(image, return_tensors="np")
        text, (part,) = ours.image(image)
        rows, columns = want["image_grid_thw"][0, 1:] // 2
        assert part.kind == "image"
        assert part.grid == (1, rows, columns)
        assert part.time_step == 1
        assert part.length == rows * columns
        assert text == IMAGE * part.length
        # A picture is seen twice by patches of two frames.
        patches = part.values.reshape(len(part.values), 3, 1, -1)
        assert part.values.dtype == np.float32
        both = np.broadcast_to(patches, (len(patches), 3, 2, patches.shape[-1]))
        np.testing.assert_array_equal(both.reshape(len(patches), -1), want["pixel_values"])


def test_a_picture_that_is_too_narrow_is_refused(tmp_path: Path) -> None:
    processor = made(tmp_path, {})
    for sides in ((402, 2), (2, 402)):
        with pytest.raises(ValueError, match="at most 200 times"):
            processor.image(picture(*sides))
    assert processor.image(picture(400, 2)).parts


def their_functions(*names: str) -> SimpleNamespace:
    """Functions of the processor of videos, whose module wants torchvision to be imported."""
    place = "models/qwen3_vl/video_processing_qwen3_vl.py"
    tree = ast.parse((Path(transformers.__file__).parent / place).read_text())
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    found: dict[str, Any] = {"math": math, "np": np, "torch": torch}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(functions, []), place, "exec", flags=flags), found)
    return SimpleNamespace(**{name: found[name] for name in names})


def theirs_of(metadata: VideoMetadata, num_frames: int, tokens: int) -> str:
    """The text for a video that transformers' processor of Qwen3-VL writes."""
    like = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token=VIDEO,
    )
    like._calculate_timestamps = lambda *given: Qwen3VLProcessor._calculate_timestamps(
        like,  # type: ignore[arg-type]
        *given,
    )
    inputs = {
        "video_grid_thw": np.array([[num_frames, 2, 2 * tokens]]),
        "video_metadata": [metadata],
    }
    return Qwen3VLProcessor.replace_video_token(like, inputs, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_frames", "frames_per_s"), [(4, 2.0), (5, 30.0), (7, 3.0), (41, 7.5), (2, 1.0), (90, 30.0)]
)
def test_videos_of_qwen_3_vl_have_the_frames_and_text_of_transformers(
    tmp_path: Path, num_frames: int, frames_per_s: float
) -> None:
    processor = made(tmp_path, OF_3, VISION_3, **OF_3)
    frames = [picture(90, 70, seed) for seed in range(num_frames)]
    text, parts = processor.video(frames, frames_per_s)
    theirs = their_functions("smart_resize", "sample_frames", "patchify")
    settings = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    metadata = VideoMetadata(total_num_frames=num_frames, fps=frames_per_s)
    kept = theirs.sample_frames(settings, metadata)
    metadata.frames_indices = kept.tolist()
    height, width = theirs.smart_resize(len(kept), 70, 90, 2, 32, 4096, 30_000)
    assert [part.grid for part in parts] == [(1, height // 32, width // 32)] * -(-len(kept) // 2)
    assert text == theirs_of(metadata, len(parts), parts[0].length)
    pixels = np.stack(
        [np.asarray(frames[at].resize((width, height), resample=3)) for at in kept.tolist()]
    )
    normed = (torch.from_numpy(pixels).permute(0, 3, 1, 2)[None].double() / 255 - 0.5) / 0.5
    patches, *_ = theirs.patchify(None, normed, 16, 2, 2)
    got = np.concatenate([part.values for part in parts])
    np.testing.assert_allclose(got, patches[0].numpy(), atol=1e-6)


def test_a_video_of_qwen_2_5_vl_is_one_part_whose_positions_tell_the_time(tmp_path: Path) -> None:
    processor = made(tmp_path, SMALL)
    frames = [picture(90, 70, seed) for seed in range(5)]
    text, (part,) = processor.video(frames, 3.0)
    assert part.grid is not None
    assert part.grid[0] == 3
    assert part.length == np.prod(part.grid)
    assert text == VIDEO * part.length
    assert part.time_step == 2 * (2 / 3.0)
    alone = processor.image(frames[4]).parts[0]
    last = part.values.reshape(3, -1, 3, 2, 14 * 14)[2]
    for half in (0, 1):  # the last frame is there twice
        np.testing.assert_array_equal(last[:, :, half].reshape(len(last), -1), alone.values)
    with pytest.raises(ValueError, match="must be at least"):
        processor.video(frames, 0.01)


def test_frames_of_qwen_2_5_vl_are_sampled_where_its_files_say_so(tmp_path: Path) -> None:
    processor = made(tmp_path, SMALL, fps=2, do_sample_frames=True, min_frames=4, **SMALL)
    for total, rate in ((30, 10.0), (61, 29.97), (7, 30.0), (100, 3.0)):
        wanted = min(max(total / rate * 2, 4), total // 2 * 2, 768)
        wanted = int(wanted // 2 * 2)
        expected = torch.arange(0, total, total / wanted).int()
        assert sampled_frames(total, rate, processor.video_spec).tolist() == expected.tolist()
    frames = [picture(60, 60, seed) for seed in range(30)]
    _, (part,) = processor.video(frames, 10.0)
    assert part.grid is not None
    assert part.grid[0] == 3
    assert part.time_step == pytest.approx(2 * 2 / 2.0)


@pytest.mark.parametrize(("num", "rate"), [(0, 2.0), (1, 2.0), (4, 0.0), (4, float("nan"))])
def test_videos_that_no_model_can_read_are_refused(tmp_path: Path, num: int, rate: float) -> None:
    processor = made(tmp_path, OF_3, VISION_3)
    with pytest.raises(ValueError, match="a video"):
        processor.video([picture(64, 64)] * num, rate)


def test_frames_of_two_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one size"):
        made(tmp_path, {}).video([picture(64, 64), picture(64, 65)], 2.0)


def test_a_model_that_sees_takes_no_audio(tmp_path: Path) -> None:
    processor = made(tmp_path, {})
    assert processor.audio_rate == 0
    with pytest.raises(ValueError, match="no audio"):
        processor.audio(np.zeros(9, np.float32))


def test_newer_files_have_both_processors_in_one(tmp_path: Path) -> None:
    whole = {"image_processor": OF_3, "video_processor": {**OF_3, "fps": 5, "max_frames": 6}}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    processor = make_qwen3_vl(tmp_path, {"vision_config": VISION_3})
    assert processor.image_spec.max_pixels == 30_000
    assert processor.video_spec.frames_per_s == 5
    assert processor.video_spec.max_frames == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch_size": 16}, "patch_size is 16 for pixels"),
        ({"do_resize": False}, "do_resize"),
        ({"resample": 9}, "resample"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": [0.5, 0, 0.5]}, "no number may be 0"),
        ({"min_pixels": 9, "max_pixels": 8}, "at least 9"),
        ({"merge_size": 3}, "spatial_merge_size 2"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        made(tmp_path, settings)
