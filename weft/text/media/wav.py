"""Reads WAV files, also those whose sizes have 64 bits (RF64, BW64): the header, and the samples in
mono.

WAV needs no package: soundfile, which reads the other formats, is an optional one, brings decoders
written in C, and is not installed on most servers. Files are not trusted: the header is checked
against the content.

Sources: ITU-R BS.2088-1 (BW64), EBU Tech 3306 (RF64).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.arrays import FloatArray

PCM = 1
FLOAT = 3
EXTENSIBLE = 0xFFFE  # the kind is in a later field
# Programs that stream a file write such a length: the samples extend to the end of the file.
UNKNOWN_LENGTH = 0x7FFFF000
IN_DS64 = 0xFFFFFFFF  # a size that the chunk `ds64` has in 64 bits
UNKNOWN_IN_DS64 = (0, 2**64 - 1)  # what programs that stream such a file leave there
MAX_CHUNKS = 1_000
BLOCK = 1 << 16  # frames that are converted at once


class Layout(NamedTuple):
    """The format of the samples in the file."""

    kind: int
    rate: int
    channels: int
    bits: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame: one sample of each channel."""
        return self.channels * self.bits // 8


class Wav(NamedTuple):
    layout: Layout
    data: memoryview  # whole frames

    @property
    def num_frames(self) -> int:
        return len(self.data) // self.layout.frame_bytes

    def mono(self) -> FloatArray:
        """The mean of the channels: [frames]. Integer samples are scaled to -1 .. 1."""
        samples = np.empty(self.num_frames, np.float32)
        size = self.layout.frame_bytes
        for start in range(0, self.num_frames, BLOCK):
            raw = self.data[start * size : (start + BLOCK) * size]
            frames = _floats(raw, self.layout).reshape(-1, self.layout.channels)
            samples[start : start + BLOCK] = frames.mean(1)
        return samples


def is_wav(raw: bytes) -> bool:
    return raw[:4] in (b"RIFF", b"RF64", b"BW64") and raw[8:12] == b"WAVE"


def read_wav(raw: bytes) -> Wav:
    """The format and samples of a file. Raises ValueError if it is damaged or not supported."""
    layout: Layout | None = None
    long_size = 0  # of the samples; 0: unknown
    for name, size, content in _chunks(raw):
        if name == b"fmt ":
            layout = _layout(content)
        elif name == b"ds64":
            long_size = _long_size(content)
        elif name == b"data":
            if layout is None:
                raise ValueError("the WAV file has samples before it says what they are")
            if size == IN_DS64 and long_size:
                size = long_size
                content = content[:size]
            elif size >= UNKNOWN_LENGTH:
                size = len(content) // layout.frame_bytes * layout.frame_bytes
                content = content[:size]
            if size > len(content):
                raise ValueError(
                    f"the WAV file is cut off: it says {size} bytes of samples, and has "
                    f"{len(content)}"
                )
            if size % layout.frame_bytes:
                raise ValueError(
                    f"the WAV file has {size} bytes of samples, which are not whole frames of "
                    f"{layout.frame_bytes} bytes"
                )
            return Wav(layout, content)
    raise ValueError("the WAV file has no samples")


def _chunks(raw: bytes) -> Iterator[tuple[bytes, int, memoryview]]:
    """Name, declared length, and present content of each chunk of the file."""
    view = memoryview(raw)
    offset = 12
    for _ in range(MAX_CHUNKS):
        if offset + 8 > len(raw):
            return
        name, size = struct.unpack_from("<4sI", raw, offset)
        offset += 8
        yield name, size, view[offset : offset + size]
        offset += size + size % 2
    raise ValueError(f"the WAV file has more than the {MAX_CHUNKS:,} chunks that are allowed")


def _long_size(content: memoryview) -> int:
    """The bytes of the samples that the chunk `ds64` states; 0: unknown."""
    if len(content) < 16:
        raise ValueError("the WAV file has sizes of 64 bits, and does not say them")
    (size,) = struct.unpack_from("<Q", content, 8)
    if size in UNKNOWN_IN_DS64:
        return 0
    return int(size)


def _layout(content: memoryview) -> Layout:
    if len(content) < 16:
        raise ValueError("the WAV file does not say what its samples are")
    kind, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", content)
    if kind == EXTENSIBLE and len(content) >= 26:
        (kind,) = struct.unpack_from("<H", content, 24)
    if (kind, bits) not in _DTYPES:
        raise ValueError(
            f"the WAV file has samples of kind {kind} with {bits} bits; supported are PCM (kind "
            "1) with 8, 16, 24 or 32 bits and floats (kind 3) with 32 or 64"
        )
    layout = Layout(kind, rate, channels, bits)
    if not channels or frame_bytes != layout.frame_bytes:
        raise ValueError(
            f"the WAV file says that {channels} channels with {bits} bits take {frame_bytes} bytes"
        )
    return layout


_DTYPES = {
    (PCM, 8): "u1",
    (PCM, 16): "<i2",
    (PCM, 24): "u1",
    (PCM, 32): "<i4",
    (FLOAT, 32): "<f4",
    (FLOAT, 64): "<f8",
}


def _floats(raw: memoryview, layout: Layout) -> FloatArray:
    """Samples [n] between -1 and 1."""
    values = np.frombuffer(raw, _DTYPES[layout.kind, layout.bits])
    if layout.kind == FLOAT:
        # A value too large for float32 becomes infinite; the caller refuses infinite values.
        with np.errstate(over="ignore"):
            return values.astype(np.float32)
    if layout.bits == 8:
        return (values.astype(np.float32) - 128) / np.float32(128)
    if layout.bits == 16:
        return values.astype(np.float32) / np.float32(2**15)
    if layout.bits == 24:
        # The three bytes become the upper bytes of an int32.
        wide = np.zeros((len(values) // 3, 4), np.uint8)
        wide[:, 1:] = values.reshape(-1, 3)
        values = wide.view("<i4").ravel()
    return values.astype(np.float32) / np.float32(2**31)
