"""Video files made of plain frames."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

av = pytest.importorskip("av", reason="the package av is not installed")
WIDTH = 64
HEIGHT = 48


def film(
    format: str = "mp4",
    codec: str = "mpeg4",
    *,
    num_frames: int = 60,
    frames_per_s: int = 30,
    second_size: tuple[int, int] | None = None,
) -> bytes:
    """The left half of frame i is a grey of 4 i, the right half red."""
    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=frames_per_s)
        stream.width = WIDTH
        stream.height = HEIGHT
        stream.pix_fmt = "yuv420p"
        for index in range(num_frames):
            pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
            pixels[:, : WIDTH // 2] = 4 * index % 256
            pixels[:, WIDTH // 2 :, 0] = 200
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()
