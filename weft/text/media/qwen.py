"""The pictures and videos of Qwen's vision models, prepared for their encoder: patches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.arrays import FloatArray, IntArray
from weft.config.config_json import get, number, require, section, size
from weft.config.model_errors import BadConfig
from weft.json_types import JsonMapping, JsonObject
from weft.messages.media import MediaKind
from weft.text.media.pixels import (
    BICUBIC,
    CLIP_DEVIATION,
    CLIP_MEAN,
    HALF,
    Looks,
    Pixels,
    Size,
    read_looks,
)
from weft.text.media.processor import Knob, MediaPart, PreparedMedia, require_item_size
from weft.text.media.processor_files import read_part, read_settings

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = "<|image_pad|>"
VIDEO = "<|video_pad|>"
# Tokens around each frame of a video, in models with timestamps between frames.
FRAME_BEGIN = "<|vision_start|>"
FRAME_END = "<|vision_end|>"
MAX_RATIO = 200  # of the sides of a picture
CHANNELS = 3
VALUE_BYTES = 4 * CHANNELS  # of a pixel, as the encoder reads it


@dataclass(frozen=True, kw_only=True)
class PixelSpec:
    """Sizes and normalization for turning pixels into patches."""

    patch_size: int  # pixels of a patch's side
    merge_size: int  # a token is a square of merge_size x merge_size patches
    time_size: int  # frames per patch
    min_pixels: int
    max_pixels: int
    looks: Looks

    @property
    def multiple(self) -> int:
        """Both sides of a resized picture are multiples of this number of pixels."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True)
class VideoSpec:
    pixels: PixelSpec
    has_timestamps: bool  # times are text between frames; else positions encode the time
    tokens_per_s: float = 0.0  # positions per second, without timestamps; 0: one per patch in time
    samples_frames: bool = False  # keep only some frames
    frames_per_s: float = 2.0  # frames per second to keep
    min_frames: int = 4
    max_frames: int = 768


class QwenVision:
    """The `MediaProcessor` of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

    The values of a picture are patches [P, colours * side * side], those of a video
    [P, colours * time_size * side * side]. The patches of a token are consecutive, row by row.
    """

    marks: Mapping[MediaKind, str] = {"image": IMAGE, "video": VIDEO}
    placeholders: Mapping[MediaKind, str] = {"image": IMAGE, "video": VIDEO}

    def __init__(self, image: PixelSpec, video: VideoSpec) -> None:
        self.image_spec = image
        self.video_spec = video

    @property
    def audio_rate(self) -> int:
        return 0

    def image(self, image: Image) -> PreparedMedia:
        spec = self.image_spec
        found = image_size(Size(image.height, image.width), spec)
        require_item_size(VALUE_BYTES * math.prod(found))
        pixels = np.asarray(spec.looks.resized(image, found))[None]
        grid = grid_of(found, 1, spec)
        part = MediaPart(
            kind="image",
            length=math.prod(grid),
            grid=grid,
            values=patches_of(pixels, spec),
        )
        return PreparedMedia(IMAGE * part.length, (part,))

    @property
    def knobs(self) -> Mapping[str, Knob]:
        """Limits on the pixels of pictures; if videos are sampled, limits on their frames."""
        found: dict[str, Knob] = {
            "min_pixels": self.image_spec.min_pixels,
            "max_pixels": self.image_spec.max_pixels,
        }
        video = self.video_spec
        if video.samples_frames:
            found["fps"] = video.frames_per_s
            found["min_frames"] = video.min_frames
            found["max_frames"] = video.max_frames
        return found

    def adjusted(self, changes: Mapping[str, Knob]) -> QwenVision:
        values = {**self.knobs, **changes}
        for least, most in (("min_pixels", "max_pixels"), ("min_frames", "max_frames")):
            if least in values and values[least] > values[most]:
                raise ValueError(
                    f"{least} is {values[least]:,}, more than the {most} of {values[most]:,}"
                )
        image = replace(
            self.image_spec,
            min_pixels=int(values["min_pixels"]),
            max_pixels=int(values["max_pixels"]),
        )
        video = self.video_spec
        if video.samples_frames:
            video = replace(
                video,
                frames_per_s=float(values["fps"]),
                min_frames=int(values["min_frames"]),
                max_frames=int(values["max_frames"]),
            )
        return QwenVision(image, video)

    def video(self, frames: Sequence[Image], frames_per_s: float) -> PreparedMedia:
        spec = self.video_spec.pixels
        if not frames or len({frame.size for frame in frames}) > 1:
            raise ValueError("a video must have frames, which all have one size")
        if not (math.isfinite(frames_per_s) and frames_per_s > 0):
            raise ValueError(f"a video has {frames_per_s:g} frames a second; that must be above 0")
        kept = sampled_frames(len(frames), frames_per_s, self.video_spec)
        before = Size(frames[0].height, frames[0].width)
        found = video_size(before, len(kept), self.video_spec)
        if not self.video_spec.has_timestamps:  # all frames are one input
            require_item_size(VALUE_BYTES * math.prod(found) * len(kept))
        resized = [spec.looks.resized(frames[index], found) for index in kept.tolist()]
        pixels = np.stack([np.asarray(frame) for frame in resized])
        # The last frame is repeated until it fills a patch.
        missing = -len(pixels) % spec.time_size
        pixels = np.concatenate((pixels, np.repeat(pixels[-1:], missing, axis=0)))
        grid = grid_of(found, len(pixels) // spec.time_size, spec)
        values = patches_of(pixels, spec)
        if self.video_spec.has_timestamps:
            times = timestamps(kept, frames_per_s, spec.time_size)
            return _frame_by_frame(values, grid, times)
        rate = len(kept) / len(frames) * frames_per_s
        step = 1.0
        if self.video_spec.tokens_per_s:
            step = self.video_spec.tokens_per_s * (spec.time_size / rate)
        if step > grid[1] * grid[2]:
            raise ValueError(
                f"a video has {rate:g} frames a second; for frames of this size it must be at "
                f"least {self.video_spec.tokens_per_s * spec.time_size / (grid[1] * grid[2]):g}"
            )
        part = MediaPart("video", math.prod(grid), grid, values, step)
        return PreparedMedia(VIDEO * part.length, (part,))

    def audio(self, samples: FloatArray) -> PreparedMedia:
        raise ValueError("the model takes no audio")


def _frame_by_frame(
    values: FloatArray, grid: tuple[int, int, int], times: list[float]
) -> PreparedMedia:
    """Each frame is a separate part, after the text of its time in seconds."""
    num_frames, rows, columns = grid
    parts = []
    text = ""
    for time_s, patches in zip(times, np.split(values, num_frames), strict=True):
        part = MediaPart("video", rows * columns, (1, rows, columns), patches)
        parts.append(part)
        text += f"<{time_s:.1f} seconds>{FRAME_BEGIN}{VIDEO * part.length}{FRAME_END}"
    return PreparedMedia(text, tuple(parts))


def image_size(actual: Size, spec: PixelSpec) -> Size:
    """The size to which a picture is resized: both sides are multiples of `spec.multiple`, the
    number of pixels is within the limits, and size and shape change as little as possible.

    Raises ValueError for a too narrow picture.
    """
    require_ratio(actual)
    return _bounded(actual, _rounded(actual, spec.multiple), 1, 1, spec)


def video_size(actual: Size, num_frames: int, spec: VideoSpec) -> Size:
    """The size to which the `num_frames` frames of a video are resized, like `image_size`. With
    timestamps the limits on pixels apply to all frames together."""
    pixels = spec.pixels
    if not spec.has_timestamps:
        return image_size(actual, pixels)
    if num_frames < pixels.time_size:
        raise ValueError(
            f"a video has {num_frames} frame{'s'[: num_frames != 1]}; this model takes videos of "
            f"at least {pixels.time_size}"
        )
    if min(actual) < pixels.multiple:
        grown = max(pixels.multiple / actual.height, pixels.multiple / actual.width)
        actual = Size(int(actual.height * grown), int(actual.width * grown))
    require_ratio(actual)
    rounded_frames = round(num_frames / pixels.time_size) * pixels.time_size
    return _bounded(actual, _rounded(actual, pixels.multiple), num_frames, rounded_frames, pixels)


def _rounded(actual: Size, multiple: int) -> Size:
    return Size(
        round(actual.height / multiple) * multiple, round(actual.width / multiple) * multiple
    )


def _bounded(
    actual: Size, rounded: Size, num_frames: int, rounded_frames: int, spec: PixelSpec
) -> Size:
    """`rounded`, or a smaller or larger size in the shape of `actual` that meets the limits."""
    multiple = spec.multiple
    num_pixels = num_frames * actual.height * actual.width
    rounded_pixels = rounded_frames * rounded.height * rounded.width
    if rounded_pixels > spec.max_pixels:
        shrunk = math.sqrt(num_pixels / spec.max_pixels)
        height = math.floor(actual.height / shrunk / multiple) * multiple
        width = math.floor(actual.width / shrunk / multiple) * multiple
        return Size(max(multiple, height), max(multiple, width))
    if rounded_pixels < spec.min_pixels:
        grown = math.sqrt(spec.min_pixels / num_pixels)
        height = math.ceil(actual.height * grown / multiple) * multiple
        width = math.ceil(actual.width * grown / multiple) * multiple
        return Size(height, width)
    return rounded


def require_ratio(actual: Size) -> None:
    if max(actual) > MAX_RATIO * min(actual):
        raise ValueError(
            f"it has {actual.width} x {actual.height} pixels; one side may be at most {MAX_RATIO} "
            "times as long as the other"
        )


def grid_of(found: Size, num_times: int, spec: PixelSpec) -> tuple[int, int, int]:
    """The grid of tokens: times, rows, columns."""
    return num_times, found.height // spec.multiple, found.width // spec.multiple


def patches_of(pixels: Pixels, spec: PixelSpec) -> FloatArray:
    """Frames [F, height, width, colours] -> patches [P, colours * frames per patch * side * side].

    Fewer than `time_size` frames are all in one patch: a picture has one frame per patch.
    """
    num_frames, height, width, _ = pixels.shape
    frames = min(num_frames, spec.time_size)
    side = spec.patch_size
    merge = spec.merge_size
    cut = pixels.reshape(
        num_frames // frames,
        frames,
        height // spec.multiple,
        merge,
        side,
        width // spec.multiple,
        merge,
        side,
        CHANNELS,
    )
    # [times, token rows, token columns, patch rows, patch columns; colours, frames, rows, columns]
    patches = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    pixels = frames * side**2
    in_order = patches.reshape(-1, CHANNELS, pixels)
    values = np.empty(in_order.shape, np.float32)
    for colour in range(CHANNELS):
        values[:, colour] = spec.looks.table[colour][in_order[:, colour]]
    return values.reshape(len(values), -1)


def sampled_frames(num_frames: int, frames_per_s: float, spec: VideoSpec) -> IntArray:
    """The indices of the frames to keep."""
    if not spec.samples_frames:
        return np.arange(num_frames, dtype=np.int32)
    if spec.has_timestamps:
        wanted = int(num_frames / frames_per_s * spec.frames_per_s)
        wanted = min(max(wanted, spec.min_frames), spec.max_frames, num_frames)
        return np.linspace(0, num_frames - 1, wanted).round().astype(np.int32)
    time_size = spec.pixels.time_size
    most = min(spec.max_frames, num_frames) // time_size * time_size
    share = min(max(num_frames / frames_per_s * spec.frames_per_s, spec.min_frames), most)
    wanted = math.floor(min(share, num_frames) / time_size) * time_size
    if not wanted:
        raise ValueError(f"a video has {num_frames} frames; this model takes at least {time_size}")
    # Rounded to float32, as in torch.
    places = np.arange(wanted) * (num_frames / wanted)
    return places.astype(np.float32).astype(np.int32)


def timestamps(kept: IntArray, frames_per_s: float, time_size: int) -> list[float]:
    """The time of each patch in time, in seconds: the mean of its first and its last frame."""
    indices = kept.tolist()
    indices += [indices[-1]] * (-len(indices) % time_size)
    seconds = [index / frames_per_s for index in indices]
    last = time_size - 1
    firsts = range(0, len(seconds), time_size)
    return [(seconds[first] + seconds[first + last]) / 2 for first in firsts]


def make_qwen2_vl(folder: Path, config: JsonMapping) -> QwenVision:
    """The processor of a model folder whose `config.json` is given. Raises ModelError."""
    return _make_qwen2(folder, section(config, "vision_config"), 0.0)


def make_qwen2_5_vl(folder: Path, config: JsonMapping) -> QwenVision:
    """As `make_qwen2_vl`."""
    vision = section(config, "vision_config")
    return _make_qwen2(folder, vision, number(vision, "tokens_per_second", 4.0, above=0.0))


def _make_qwen2(folder: Path, vision: JsonMapping, tokens_per_s: float) -> QwenVision:
    image, video = _read_files(folder)
    limits = (56 * 56, 28 * 28 * 1280)
    of_frames = (128 * 28 * 28, 28 * 28 * 768)
    looks = (CLIP_MEAN, CLIP_DEVIATION)
    of_video = VideoSpec(
        pixels=_pixel_spec(video, vision, of_frames, looks, patch_size=14),
        has_timestamps=False,
        tokens_per_s=tokens_per_s,
        samples_frames=get(video, "do_sample_frames", bool, False) and "fps" in video,
        **_sampling(video),
    )
    return QwenVision(_pixel_spec(image, vision, limits, looks, patch_size=14), of_video)


def make_qwen3_vl(folder: Path, config: JsonMapping) -> QwenVision:
    """As `make_qwen2_vl`."""
    vision = section(config, "vision_config")
    image, video = _read_files(folder)
    limits = (56 * 56, 28 * 28 * 1280)
    of_frames = (128 * 32 * 32, 32 * 32 * 768)
    of_video = VideoSpec(
        pixels=_pixel_spec(video, vision, of_frames, (HALF, HALF), patch_size=16),
        has_timestamps=True,
        samples_frames=get(video, "do_sample_frames", bool, True),
        **_sampling(video),
    )
    return QwenVision(_pixel_spec(image, vision, limits, (HALF, HALF), patch_size=16), of_video)


def _read_files(folder: Path) -> tuple[JsonObject, JsonObject]:
    """The settings for pictures and for videos in the files of a model."""
    image = read_settings(folder)
    video = read_part(folder, "video_processor", "video_preprocessor_config.json")
    return image, video or image


def _pixel_spec(
    settings: JsonMapping,
    vision: JsonMapping,
    limits: tuple[int, int],
    looks: tuple[tuple[float, ...], tuple[float, ...]],
    *,
    patch_size: int,
) -> PixelSpec:
    """The settings of a file. `vision` is the `vision_config` of the encoder; `limits` (least and
    most pixels), `looks` (mean and deviation) and `patch_size` are defaults. Raises ModelError."""
    require(settings, "do_resize", True)
    sizes = {"patch_size": patch_size, "merge_size": 2, "temporal_patch_size": 2}
    wanted = {"merge_size": "spatial_merge_size"}
    for key, default in sizes.items():
        key_there = wanted.get(key, key)
        there = size(vision, key_there, default)
        sizes[key] = size(settings, key, there)
        if sizes[key] != there:
            raise BadConfig(
                f"{key} is {sizes[key]} for pixels, and {key_there} {there} for the encoder"
            )
    bounds = section(settings, "size")
    min_pixels = size(settings, "min_pixels", size(bounds, "shortest_edge", limits[0]))
    max_pixels = size(settings, "max_pixels", size(bounds, "longest_edge", limits[1]))
    if min_pixels > max_pixels:
        raise BadConfig(f"pictures have at least {min_pixels} pixels, and at most {max_pixels}")
    return PixelSpec(
        patch_size=sizes["patch_size"],
        merge_size=sizes["merge_size"],
        time_size=sizes["temporal_patch_size"],
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        looks=read_looks(settings, filter=BICUBIC, mean=looks[0], deviation=looks[1]),
    )


def _sampling(video: JsonMapping) -> JsonObject:
    return {
        "frames_per_s": number(video, "fps", 2.0, above=0.0),
        "min_frames": size(video, "min_frames", 4),
        "max_frames": size(video, "max_frames", 768),
    }
