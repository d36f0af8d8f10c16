"""Pictures and sounds, as transformers takes them and as parts of messages."""

from __future__ import annotations

import base64
import io
import struct
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

RATE = 16_000  # samples a second


class Item(NamedTuple):
    """A picture or a sound: as transformers takes it, and as a part of a message."""

    value: Any
    part: dict[str, Any]


def picture(seed: int, width: int, height: int) -> Item:
    """Of blurred noise: something is to be seen in it at every size."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    url = {"url": f"data:image/png;base64,{data}"}
    return Item(image, {"type": "image_url", "image_url": url})


def sound(seed: int, length: int) -> Item:
    rng = np.random.default_rng(seed)
    whole = np.round(3_000 * rng.standard_normal(length)).astype("<i2")
    layout = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", 16) + layout
    body += b"data" + struct.pack("<I", whole.nbytes) + whole.tobytes()
    data = base64.b64encode(b"RIFF" + struct.pack("<I", len(body)) + body).decode()
    value = whole.astype(np.float32) / 32_768
    return Item(value, {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
