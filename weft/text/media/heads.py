"""What the heads of picture files say, without decoding anything: sizes, scans, frames.

The bytes are not trusted. A head is parsed in few steps, whatever it says: a file with more parts
than `MAX_PARTS` is refused.
"""

from __future__ import annotations

import re
import struct

from weft.text.media.errors import MediaError

MAX_PARTS = 100_000  # segments of a JPEG, blocks of a GIF
FEW_PARTS = 1_000  # segments of a JPEG before its size, if only the size is asked for

# A marker of JPEG: not a byte 0xff of compressed data (0xff00), and not a restart (0xffd0 to d7).
_MARKER = re.compile(rb"\xff+([\x01-\xcf\xd8-\xfe])")
_TEM, _SOI, _EOI, _SOS = 0x01, 0xD8, 0xD9, 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # the size is in these


def size_in_head(data: bytes) -> tuple[int, int] | None:
    """Width and height; None if they are not where such files have them."""
    try:
        if data.startswith(b"\x89PNG"):
            width, height = struct.unpack_from(">II", data, 16)
            return width, height
        if data.startswith(b"\xff\xd8"):
            return _jpeg_size(data)
        if data.startswith(b"RIFF"):
            return webp_size(data)
        if data.startswith(b"GIF8"):
            width, height = struct.unpack_from("<HH", data, 6)
            return width, height
        if data.startswith(b"BM"):
            is_old = data[14:18] == struct.pack("<I", 12)
            width, height = struct.unpack_from("<HH" if is_old else "<ii", data, 18)
            return width, abs(height)
    except (struct.error, MediaError):
        return None
    return None


def webp_size(data: bytes) -> tuple[int, int]:
    """Width and height of the canvas, from the first chunk. Raises `MediaError`.

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


def num_scans(data: bytes, most: int) -> int:
    """The scans of a JPEG, in each of which a decoder may touch all pixels; counted up to
    `most` + 1.

    Source: ITU-T T.81, annex B.
    """
    offset = 2
    scans = 0
    for _ in range(MAX_PARTS):
        found = _MARKER.search(data, offset)
        if found is None:
            return scans
        marker = found[1][0]
        offset = found.end()
        if marker == _EOI:
            return scans
        if marker in (_TEM, _SOI):
            continue
        scans += marker == _SOS
        if scans > most:
            return scans
        offset += int.from_bytes(data[offset : offset + 2], "big")
    raise MediaError(f"it has more than the {MAX_PARTS:,} segments that are allowed")


def gif_frames(data: bytes) -> int:
    """The frames of a GIF. Raises `MediaError` if it has too many blocks.

    Source: the GIF89a specification, sections 17 to 26.
    """
    offset = 13
    if len(data) > 10:
        offset += _palette_len(data[10])
    frames = 0
    blocks = 0
    while offset < len(data):
        kind = data[offset : offset + 1]
        if kind == b",":  # an image: its position and size, a palette, the size of a code
            frames += 1
            flags = data[offset + 9] if offset + 9 < len(data) else 0
            offset += 10 + _palette_len(flags) + 1
        elif kind == b"!":
            offset += 2
        elif kind == b";":
            break
        else:
            offset += 1  # decoders skip what they do not know
            blocks += 1
            continue
        while True:
            blocks += 1
            if blocks > MAX_PARTS * 10:
                raise MediaError(f"it has more than the {MAX_PARTS * 10:,} blocks that are allowed")
            size = data[offset] if offset < len(data) else 0
            offset += 1 + size
            if not size:
                break
    return frames


def _palette_len(flags: int) -> int:
    """Bytes of the palette that these flags announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    offset = 2
    for _ in range(FEW_PARTS):
        found = _MARKER.match(data, offset)
        if found is None or found[1][0] in (_EOI, _SOS):
            return None
        offset = found.end()
        if found[1][0] in _FRAMES:
            height, width = struct.unpack_from(">HH", data, offset + 3)
            return width, height
        offset += int.from_bytes(data[offset : offset + 2], "big")
    return None
