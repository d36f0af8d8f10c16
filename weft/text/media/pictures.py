"""Decodes picture files: first the format and size, then the pixels.

The format comes from the bytes of a file, never from its name or declared type. The size is read
from the header and checked against the limit before any pixel is decoded. Only the decoders named
here ever read a byte.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from weft.text.media.errors import MediaError, MediaTooLarge
from weft.text.media.limits import MediaLimits

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
ALLOWED = "PNG, JPEG, WebP, GIF and BMP are allowed"
LIMIT = "max_image_pixels"
ORIENTATION = 0x0112  # tag of EXIF

# First bytes of other formats that clients send; the error names the format.
_OTHERS = (
    (b"%PDF", "a PDF"),
    (b"<svg", "an SVG"),
    (b"<?xml", "an SVG or other XML"),
    (b"<!DOCTYPE", "a page of HTML or an SVG"),
    (b"<html", "a page of HTML"),
    (b"II*\x00", "a TIFF"),
    (b"MM\x00*", "a TIFF"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1a\x45\xdf\xa3", "a WebM or Matroska video"),
    (b"\x00\x00\x01\x00", "an icon"),
    (b"8BPS", "a Photoshop file"),
    (b"%!PS", "a PostScript file"),
    (b"RIFF", "a RIFF file of another kind"),
)


def format_of(data: bytes, allowed: str = ALLOWED) -> str:
    """PNG, JPEG, WEBP, GIF or BMP. Raises `MediaError` for anything else; `allowed`: what its
    message says."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"BM"):
        return "BMP"
    if not data:
        raise MediaError(f"it is empty; {allowed}")
    if data[4:8] == b"ftyp":
        raise MediaError(f"it is an MP4, HEIC or AVIF file; {allowed}")
    head = data[:256].lstrip(b"\xef\xbb\xbf \t\r\n")
    for beginning, name in _OTHERS:
        if head.startswith(beginning):
            raise MediaError(f"it is {name}; {allowed}")
    raise MediaError(f"its bytes begin like no known format; {allowed}")


def open_picture(data: bytes, max_pixels: int, allowed: str = ALLOWED) -> Image:
    """The picture of a file, not decoded yet: it has a size and a mode, and no pixels.

    `allowed`: the allowed formats, for messages. Raises `MediaError` if it is not a picture, or has
    more than `max_pixels`.
    """
    from PIL import Image

    format = format_of(data, allowed)
    if format == "WEBP":  # opening a WebP file allocates the memory of its pixels
        _check_size(_webp_size(data), max_pixels)
    try:
        image = Image.open(io.BytesIO(data), formats=(format,))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        message = f"it has more pixels than the {max_pixels:,} that are allowed"
        raise MediaTooLarge(LIMIT, message) from exc
    except Exception as exc:  # decoders raise many kinds of exceptions
        raise MediaError(f"it begins like a {format} file, but cannot be read") from exc
    _check_size(image.size, max_pixels)
    return image


def decode_picture(image: Image) -> Image:
    """The pixels of an opened picture, upright, in RGB; of several frames, the first.

    As in transformers, transparency is dropped, not blended with a background. Raises
    `MediaError` for a truncated or damaged file.
    """
    try:
        image.load()
    except Exception as exc:
        raise MediaError(f"its pixels cannot be decoded: {_reason(exc)}") from exc
    image = _upright(image)
    if image.mode == "RGB":
        return image
    try:
        return image.convert("RGB")
    except Exception as exc:
        message = f"its pixels ({image.mode}) cannot be made RGB"
        raise MediaError(message) from exc


def decode_frames(image: Image, limits: MediaLimits) -> tuple[list[Image], float]:
    """All frames of an opened animation, in RGB, and its frames per second (0: unknown).

    Raises `MediaError` for more than `limits` allow, and for a damaged file.
    """
    try:
        num_frames = int(getattr(image, "n_frames", 1))
    except Exception as exc:
        raise MediaError(f"its frames cannot be counted: {_reason(exc)}") from exc
    limits.require_frames(num_frames, image.size)
    frames: list[Image] = []
    duration_ms = 0.0
    for frame in _frames(image, num_frames):
        frames.append(frame.convert("RGB"))
        duration_ms += float(image.info.get("duration") or 0.0)
    frames_per_s = 0.0
    if duration_ms > 0:
        frames_per_s = 1000.0 * len(frames) / duration_ms
    return frames, frames_per_s


def _frames(image: Image, num_frames: int) -> Iterator[Image]:
    size = image.size
    for index in range(num_frames):
        try:
            image.seek(index)
            if image.size == size:
                image.load()
        except Exception as exc:
            message = f"its frame {index} cannot be decoded: {_reason(exc)}"
            raise MediaError(message) from exc
        if image.size != size:  # a frame may be larger than the size in the header
            raise MediaError(f"its frame {index} is larger than the first")
        yield image


def _upright(image: Image) -> Image:
    """The picture turned and mirrored by its EXIF orientation; unchanged if EXIF is unreadable."""
    from PIL.Image import Transpose

    # Only this one EXIF tag is used, because the data cannot be trusted.
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(ORIENTATION, 1))
    except Exception:
        return image
    return image if turn is None else image.transpose(turn)


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(f"it is {width} x {height} pixels large")
    if width * height > max_pixels:
        raise MediaTooLarge(
            LIMIT,
            f"it is {width:,} x {height:,} pixels large, which are {width * height:,}; "
            f"{max_pixels:,} are allowed",
        )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height of the canvas, from the first chunk.

    Source: the WebP container specification (RFC 9649), sections 2.5 to 2.7.
    """
    kind = data[12:16]
    try:
        if kind == b"VP8X":
            width = int.from_bytes(data[24:27], "little") + 1
            height = int.from_bytes(data[27:30], "little") + 1
            return width, height
        if kind == b"VP8L":
            [bits] = struct.unpack_from("<I", data, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        if kind == b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
    except struct.error as exc:
        raise MediaError("it begins like a WebP file, but is cut off") from exc
    raise MediaError("it begins like a WebP file, but cannot be read")


def _reason(exc: Exception) -> str:
    text = str(exc) or type(exc).__name__
    return text[:200]
