"""Pictures whose scans cost a decoder much."""

from __future__ import annotations

from PIL import Image

from tests.text.media_fakes import saved


def scanned(num_repeats: int) -> bytes:
    """A progressive JPEG whose last scan comes so many more times."""
    data = saved(Image.effect_noise((64, 64), 90).convert("RGB"), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * num_repeats + b"\xff\xd9"
