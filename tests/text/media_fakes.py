"""Files of pictures, good and bad, and a processor that makes little of them."""

from __future__ import annotations

import io
import os
import signal
import struct
import time
import wave
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from PIL import Image

from weft.arrays import FloatArray
from weft.config.process import limit_work
from weft.messages.media import MediaKind
from weft.text.media.families import ProcessorRecipe
from weft.text.media.processor import Knob, MediaPart, PreparedMedia

MARK = "<image>"
PAD = "<pad>"
VIDEO_MARK = "<video>"


class FakeProcessor:
    """A picture stands for one token for each 4 of its pixels in width (up to `max_width`), between
    < and >; its value is its mean colour. A video has a part for each frame, with text between."""

    marks: Mapping[MediaKind, str] = {"image": MARK, "video": VIDEO_MARK}
    placeholders: Mapping[MediaKind, str] = {"image": PAD, "video": PAD}
    audio_rate = 0

    def __init__(self, max_width: int = 100_000) -> None:
        self.seen: list[Image.Image] = []
        self._max_width = max_width

    def image(self, image: Image.Image) -> PreparedMedia:
        assert image.mode == "RGB"
        self.seen.append(image)
        if image.width < 2:
            raise ValueError("it is too narrow for this model: 1 pixel; at least 2 are needed")
        part = self._part("image", image)
        return PreparedMedia(f"<{PAD * part.length}>", (part,))

    def video(self, frames: Sequence[Image.Image], frames_per_s: float) -> PreparedMedia:
        self.seen += frames
        parts = tuple(self._part("video", frame) for frame in frames)
        texts = [
            f"{place / frames_per_s:.1f}s{PAD * part.length}" for place, part in enumerate(parts)
        ]
        return PreparedMedia(" ".join(texts), parts)

    def audio(self, samples: FloatArray) -> PreparedMedia:
        raise AssertionError("it takes no sound")

    @property
    def knobs(self) -> Mapping[str, Knob]:
        return {"max_width": self._max_width}

    def adjusted(self, changes: Mapping[str, Knob]) -> FakeProcessor:
        return FakeProcessor(int(changes["max_width"]))

    def _part(self, kind: MediaKind, image: Image.Image) -> MediaPart:
        values = np.asarray(image, dtype=np.float32).mean(axis=(0, 1))
        length = max(min(image.width, self._max_width) // 4, 1)
        return MediaPart(kind, length, (1, 1, length), values)


class HearingProcessor(FakeProcessor):
    """A sound stands for a token for each 1,000 samples."""

    marks: Mapping[MediaKind, str] = {"audio": "<sound>"}
    placeholders: Mapping[MediaKind, str] = {"audio": "<pad>"}
    audio_rate = 16_000

    def audio(self, samples: FloatArray) -> PreparedMedia:
        length = len(samples) // 1_000
        part = MediaPart("audio", length, None, samples[::1_000])
        return PreparedMedia("<pad>" * length, (part,))


class TroubledProcessor(FakeProcessor):
    """What a decoder could do with a file, by the colour of its first pixel."""

    def image(self, image: Image.Image) -> PreparedMedia:
        match image.getpixel((0, 0)):
            case (0, 0, 0):
                read_without_end()
            case (0, 0, 255):  # works until it has used its time
                limit_work(0.05)
                while True:
                    pass
            case (0, 255, 0):
                np.ones(10**10, np.uint8)
            case (255, 255, 255):
                os.kill(os.getpid(), signal.SIGSEGV)
            case (255, 255, 0):
                raise ZeroDivisionError("a fault of ours")
        return super().image(image)


def read_without_end() -> NoReturn:
    """Go on until somebody ends this process; tests see it by its name."""
    limit_work(0.0)
    Path("/proc/self/comm").write_text("endless")
    while True:
        time.sleep(1.0)


class EndlessProcessor(FakeProcessor):
    """Takes everything, and never has it."""

    marks: Mapping[MediaKind, str] = {"image": MARK, "video": VIDEO_MARK, "audio": "<sound>"}
    placeholders: Mapping[MediaKind, str] = {"image": PAD, "video": PAD, "audio": PAD}
    audio_rate = 16_000

    def image(self, image: Image.Image) -> PreparedMedia:
        read_without_end()

    def video(self, frames: Sequence[Image.Image], frames_per_s: float) -> PreparedMedia:
        read_without_end()

    def audio(self, samples: FloatArray) -> PreparedMedia:
        read_without_end()


ENDLESS = (0, 0, 0)
LATE = (0, 0, 255)
GREEDY = (0, 255, 0)
CRASHING = (255, 255, 255)
FAULTY = (255, 255, 0)


def troubled(folder: Path, config: Mapping[str, Any]) -> TroubledProcessor:
    return TroubledProcessor()


def seeing(folder: Path, config: Mapping[str, Any]) -> FakeProcessor:
    return FakeProcessor()


def hearing(folder: Path, config: Mapping[str, Any]) -> HearingProcessor:
    return HearingProcessor()


def endless(folder: Path, config: Mapping[str, Any]) -> EndlessProcessor:
    return EndlessProcessor()


READING_WITHOUT_END = ProcessorRecipe("tests.text.media_fakes:endless")
SEEING = ProcessorRecipe("tests.text.media_fakes:seeing")
TROUBLED = ProcessorRecipe("tests.text.media_fakes:troubled")
HEARING = ProcessorRecipe("tests.text.media_fakes:hearing")


def picture(
    width: int = 8, height: int = 8, colour: Any = (255, 0, 0), mode: str = "RGB"
) -> Image.Image:
    return Image.new(mode, (width, height), colour)


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def packed_zeros(num_zeros: int) -> bytes:
    """So many zeros as zlib packs them: a million are packed once, and repeated."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    million = packer.compress(bytes(10**6)) + packer.flush(zlib.Z_FULL_FLUSH)
    rest = packer.compress(bytes(num_zeros % 10**6)) + packer.flush()
    adler = (num_zeros % 65_521 << 16) + 1  # the sum of what is packed
    return b"\x78\x9c" + million * (num_zeros // 10**6) + rest + adler.to_bytes(4, "big")


def png_of_size(width: int, height: int, num_zeros: int = 0) -> bytes:
    """A head that says so, and so many bytes of black behind it."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = png_chunk(b"IDAT", packed_zeros(num_zeros)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + body


def animation(num_frames: int, size: tuple[int, int] = (8, 8), format: str = "GIF") -> bytes:
    frames = [Image.new("RGB", size, (10 * place % 256, 0, 50)) for place in range(num_frames)]
    return saved(frames[0], format, save_all=True, append_images=frames[1:], duration=250)


def wav(num_samples: int, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(bytes(2 * num_samples))
    return file.getvalue()
