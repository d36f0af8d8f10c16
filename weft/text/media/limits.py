"""Limits on the size of media in a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from weft.config.media_options import PER_PROMPT
from weft.text.media.errors import MediaTooLarge
from weft.text.media.sound import MAX_SECONDS


class MediaLimits(NamedTuple):
    """The fields have the names of options."""

    max_bytes: int = 64_000_000  # of all files of a request together
    max_image_pixels: int = 36_000_000
    max_video_frames: int = 768
    max_video_pixels: int = 64_000_000  # of all frames together
    max_audio_s: float = MAX_SECONDS
    per_prompt: Mapping[str, int] = PER_PROMPT

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
