"""Limits on the size of media in a request, and on what the process that reads them may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from weft.config.media_options import PER_PROMPT
from weft.messages.media import MediaKind
from weft.text.media.errors import MediaTooLarge
from weft.text.media.sound import ANY_SOUND, SoundLimit

MAX_SIDE = 32_768  # pixels of one side of a picture
MAX_RATIO = 200  # of the sides of a picture
MAX_SCANS = 100  # of a JPEG; programs write about ten
PACKETS_PER_FRAME = 64  # packets of a video file that are read for each frame that may be kept

LONG_PIXELS = 1_000_000  # a picture of more pixels is long work

# What one file may take: a part that is always there, and a part for each unit of its limit.
BASE_WORK_S = 5.0  # of processor time
BASE_BYTES = 1 << 29
WORK_S: dict[MediaKind, float] = {"image": 2e-7, "video": 1e-6, "audio": 1 / 6}
# Bytes for each pixel: it is there as decoded, rotated, and in the state of a decoder. Bytes for
# each second of a sound: 192,000 samples, a few times.
BYTES: dict[MediaKind, int] = {"image": 16, "video": 16, "audio": 1 << 22}


class MediaLimits(NamedTuple):
    """The fields of numbers have the names of options."""

    max_bytes: int = 64_000_000  # of all files of a request together
    max_image_pixels: int = 36_000_000
    max_video_frames: int = 768
    max_video_pixels: int = 64_000_000  # of all frames together
    audio: SoundLimit = ANY_SOUND
    per_prompt: Mapping[str, int] = PER_PROMPT

    @property
    def max_packets(self) -> int:
        """Packets of a video file, each of which is at most a frame."""
        return PACKETS_PER_FRAME * self.max_video_frames

    def work_s(self, kind: MediaKind) -> float:
        """Seconds of processor time that the largest allowed file of this kind may take."""
        return BASE_WORK_S + WORK_S[kind] * self._most(kind)

    def work_bytes(self, kind: MediaKind) -> int:
        """Bytes of memory that the largest allowed file of this kind may take."""
        return BASE_BYTES + int(BYTES[kind] * self._most(kind))

    def of_short_work(self) -> MediaLimits:
        """The limits for a picture whose head promises short work; twice as many pixels, because
        some formats have half of the limit."""
        return self._replace(max_image_pixels=min(self.max_image_pixels, 2 * LONG_PIXELS))

    def _most(self, kind: MediaKind) -> float:
        if kind == "image":
            return self.max_image_pixels
        if kind == "video":
            return self.max_video_pixels
        return self.audio.max_s

    def require_frames(self, num_frames: int, size: tuple[int, int]) -> None:
        """Raise `MediaTooLarge` for a video with too many frames, or too many pixels. For a format
        whose frames are all kept. `size`: width and height in pixels."""
        if num_frames > self.max_video_frames:
            message = f"it has {num_frames:,} frames; {self.max_video_frames:,} are allowed"
            raise MediaTooLarge("max_video_frames", message)
        width, height = size
        num_pixels = num_frames * width * height
        if num_pixels > self.max_video_pixels:
            message = (
                f"its {num_frames:,} frames of {width:,} x {height:,} pixels have "
                f"{num_pixels:,} pixels; {self.max_video_pixels:,} are allowed"
            )
            raise MediaTooLarge("max_video_pixels", message)
