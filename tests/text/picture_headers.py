"""Heads of picture files that claim a size."""

from __future__ import annotations

import struct

from tests.text.media_fakes import picture, saved


def webp_of_size(width: int, height: int) -> bytes:
    body = b"\0\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunk = b"VP8X" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def bmp_of_size(width: int, height: int) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head


def jpeg_of_size(width: int, height: int) -> bytes:
    data = bytearray(saved(picture(), "JPEG"))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def gif_of_size(width: int, height: int) -> bytes:
    """Of a screen of one pixel, with a frame that reaches beyond it."""
    data = bytearray(saved(picture(1, 1), "GIF"))
    place = data.index(b"\x2c", 13) + 5
    data[place : place + 4] = struct.pack("<HH", width, height)
    return bytes(data)
