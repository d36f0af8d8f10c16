"""Reads the files of media: decodes them, and prepares them with the model's processor.

A server does this in a process with limits (`reader_process.py`); `weft.LLM` in its own. It knows
nothing of requests, addresses and caches.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.messages.media import MediaKind
from weft.text.media.errors import MediaError
from weft.text.media.limits import MediaLimits
from weft.text.media.pictures import decode_frames, decode_picture, open_picture
from weft.text.media.processor import MediaProcessor, PreparedMedia
from weft.text.media.sound import decode_sound
from weft.text.media.video import ALLOWED as VIDEO_FORMATS
from weft.text.media.video import FRAMES_PER_S, container_of, decode_video


def read_media(
    processor: MediaProcessor,
    limits: MediaLimits,
    kind: MediaKind,
    files: Sequence[bytes],
    frames_per_s: float,
) -> PreparedMedia:
    """One picture, video or sound. `files` is one file, or one for each frame of a video, of which
    there are `frames_per_s` per second (0: unknown).

    Raises ValueError, with a message for the client, for a file that is none, is damaged, exceeds
    a limit, or that the model cannot take.
    """
    if kind == "image":
        image = open_picture(files[0], limits.max_image_pixels)
        return processor.image(decode_picture(image))
    if kind == "audio":
        return processor.audio(decode_sound(files[0], processor.audio_rate, limits.audio))
    if len(files) > 1:
        return _frames(processor, limits, files, frames_per_s or FRAMES_PER_S)
    container = container_of(files[0])
    if container:
        return processor.video(*decode_video(files[0], container, limits))
    animation = open_picture(files[0], limits.max_image_pixels, VIDEO_FORMATS)
    frames, own_rate = decode_frames(animation, limits)
    return processor.video(frames, frames_per_s or own_rate or FRAMES_PER_S)


def _frames(
    processor: MediaProcessor,
    limits: MediaLimits,
    files: Sequence[bytes],
    frames_per_s: float,
) -> PreparedMedia:
    """A video that comes as one picture for each frame."""
    first = open_picture(files[0], limits.max_image_pixels)
    limits.require_frames(len(files), first.size)
    frames = []
    for index, file in enumerate(files):
        image = open_picture(file, limits.max_image_pixels)
        if image.size != first.size:
            raise MediaError(f"its frame {index} has another size than the first")
        frames.append(decode_picture(image))
    return processor.video(frames, frames_per_s)
