"""Decodes picture files: first the format and size, then the pixels.

The format comes from the bytes of a file, never from its name or declared type. The size is read
from the header and checked against the limits before any pixel is decoded: the number of pixels,
each side, and their ratio, because the work of resizing grows with each of them alone. Only the
decoders named here ever read a byte.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from weft.text.media.errors import MediaError, MediaTooLarge
from weft.text.media.heads import gif_frames, num_scans, webp_size
from weft.text.media.limits import MAX_RATIO, MAX_SCANS, MAX_SIDE, MediaLimits

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
ALLOWED = "PNG, JPEG, WebP, GIF and BMP are allowed"
LIMIT = "max_image_pixels"
ORIENTATION = 0x0112  # tag of EXIF
# A JPEG may have this many times the allowed pixels: it is reduced while it is decoded.
REDUCED = 4
# The decoder of WebP takes 16 bytes for a pixel, those of the other formats 4 to 8.
WEBP_SHARE = 2

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


def open_picture(data: bytes, max_pixels: int, allowed: str = ALLOWED) -> ImageFile:
    """The picture of a file, not decoded yet: it has a size and a mode, and no pixels.

    A JPEG of more than `max_pixels` has half of its sides, or less: it is decoded so. `allowed`:
    the allowed formats, for messages. Raises `MediaError` if it is not a picture, or has too many
    pixels, too long sides or too many scans.
    """
    from PIL import Image

    format = format_of(data, allowed)
    most = max_pixels
    if format == "WEBP":  # opening a WebP file allocates the memory of its pixels
        most = max(max_pixels // WEBP_SHARE, 1)
        _check_size(webp_size(data), most, "in a WebP file")
    if format == "JPEG":
        most = max_pixels * REDUCED
        _check_scans(data)
    try:
        with warnings.catch_warnings():
            # Of many pixels, which are counted below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=(format,))
    except Image.DecompressionBombError as exc:
        message = f"it has more pixels than the {max_pixels:,} that are allowed"
        raise MediaTooLarge(LIMIT, message) from exc
    except MemoryError:
        raise
    except Exception as exc:  # decoders raise many kinds of exceptions
        raise MediaError(f"it begins like a {format} file, but cannot be read") from exc
    _check_size(image.size, most, "in a JPEG, which is reduced" if format == "JPEG" else "")
    _reduce(image, max_pixels)
    return image


def decode_picture(image: Image) -> Image:
    """The pixels of an opened picture, upright, in RGB; of several frames, the first.

    As in transformers, transparency is dropped, not blended with a background. Raises
    `MediaError` for a truncated or damaged file.
    """
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as exc:
        raise MediaError(f"its pixels cannot be decoded: {_reason(exc)}") from exc
    image = _upright(image)
    if image.mode == "RGB":
        return image
    try:
        return image.convert("RGB")
    except MemoryError:
        raise
    except Exception as exc:
        message = f"its pixels ({image.mode}) cannot be made RGB"
        raise MediaError(message) from exc


def decode_frames(image: ImageFile, limits: MediaLimits) -> tuple[list[Image], float]:
    """All frames of an opened animation, in RGB, and its frames per second (0: unknown).

    Raises `MediaError` for more than `limits` allow, and for a damaged file.
    """
    num_frames = _num_frames(image)
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


def _num_frames(image: ImageFile) -> int:
    if image.format == "GIF":  # Pillow counts them in Python, however many there are
        assert image.fp is not None
        image.fp.seek(0)
        return gif_frames(image.fp.read())
    try:
        return int(getattr(image, "n_frames", 1))
    except MemoryError:
        raise
    except Exception as exc:
        raise MediaError(f"its frames cannot be counted: {_reason(exc)}") from exc


def _frames(image: Image, num_frames: int) -> Iterator[Image]:
    size = image.size
    for index in range(num_frames):
        try:
            image.seek(index)
            if image.size == size:
                image.load()
        except MemoryError:
            raise
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
    rotations = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        rotation = rotations.get(image.getexif().get(ORIENTATION, 1))
    except Exception:
        return image
    return image if rotation is None else image.transpose(rotation)


def _check_size(size: tuple[int, int], max_pixels: int, where: str = "") -> None:
    """Raise `MediaError` for a picture that is too large. `where`: what has this limit of pixels,
    if not every picture."""
    width, height = size
    found = f"it is {width:,} x {height:,} pixels large"
    if width < 1 or height < 1:
        raise MediaError(found)
    if width * height > max_pixels:
        allowed = f"{max_pixels:,} are allowed"
        if where:
            allowed += f" {where}"
        raise MediaTooLarge(LIMIT, f"{found}, which are {width * height:,}; {allowed}")
    if max(size) > MAX_SIDE:
        raise MediaError(f"{found}; one side may have at most {MAX_SIDE:,}")
    if max(size) > MAX_RATIO * min(size):
        raise MediaError(f"{found}; one side may be at most {MAX_RATIO} times as long as the other")


def _check_scans(data: bytes) -> None:
    """Raise `MediaError` for a JPEG with too many scans: each may take as long as the picture."""
    scans = num_scans(data, MAX_SCANS)
    if scans > MAX_SCANS:
        raise MediaError(f"it is a JPEG of more than {MAX_SCANS} scans; {MAX_SCANS} are allowed")


def _reduce(image: Image, max_pixels: int) -> None:
    """Let a JPEG be decoded at a half, a quarter or an eighth of its sides, if it is too large."""
    width, height = image.size
    if width * height <= max_pixels:
        return
    for divisor in (2, 4, 8):
        reduced = (-(-width // divisor), -(-height // divisor))
        if reduced[0] * reduced[1] <= max_pixels:
            image.draft(None, (max(width // divisor, 1), max(height // divisor, 1)))
            break
    _check_size(image.size, max_pixels)


def _reason(exc: Exception) -> str:
    text = str(exc) or type(exc).__name__
    return text[:200]
