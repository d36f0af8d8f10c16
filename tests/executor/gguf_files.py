"""Writes GGUF files for tests: small, whole, and made without anybody's package."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.weights.gguf.blocks import BLOCKS
from weft.weights.gguf.reader import TYPES

ALIGNMENT = 32
NUMBER_OF = {kind.name: number for number, kind in TYPES.items()}
OF_DTYPE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class Stored(NamedTuple):
    """A tensor as it stands in a file."""

    kind: str
    shape: tuple[int, ...]  # as torch has it
    data: bytes


def plain(tensor: Tensor) -> Stored:
    """A tensor of floats."""
    tensor = tensor.contiguous()
    return Stored(
        OF_DTYPE[tensor.dtype], tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes()
    )


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> Stored:
    """Random codes, with scales that keep weights below 1."""
    form = BLOCKS[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (math.prod(shape) // form.size, form.num_bytes), dtype=np.uint8)
    set_scales(kind, blocks, rng)
    return Stored(kind, shape, blocks.tobytes())


def set_scales(kind: str, blocks: NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Give each block finite and small scales."""
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(110, 122, len(blocks))
        return
    if kind == "IQ1_M":  # four bits of the scale in each of four words
        words = blocks[:, 48:].copy().view(np.uint16) & np.uint16(0x0FFF)
        scales = rng.uniform(-1e-4, 1e-4, (len(blocks), 1)).astype(np.float16).view(np.uint16)
        parts = scales >> np.array([0, 4, 8, 12], dtype=np.uint16) << np.uint16(12)
        blocks[:, 48:] = (words | parts).view(np.uint8)
        return
    starts = {
        **{"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
        **{"Q2_K": (80, 82), "Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,)},
    }
    for start in starts.get(kind, (0,)):
        scales = rng.uniform(-1e-4, 1e-4, (len(blocks), 1)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)


def paired(rows: Tensor, num_heads: int) -> Tensor:
    """Rows in GGUF's order for "llama": those that rotate together side by side."""
    heads = rows.view(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> bytes:
    """A whole file."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for name, value in metadata.items():
        header += _text(name) + _value(value)
    data = b""
    for name, stored in tensors.items():
        data += b"\0" * (-len(data) % ALIGNMENT)
        header += _text(name) + struct.pack("<I", len(stored.shape))
        header += b"".join(struct.pack("<Q", size) for size in reversed(stored.shape))
        header += struct.pack("<IQ", NUMBER_OF[stored.kind], len(data))
        data += stored.data
    return header + b"\0" * (-len(header) % ALIGNMENT) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def write_split(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], num_parts: int
) -> list[Path]:
    """The model in several files; `path` is the name without the numbers."""
    names = list(tensors)
    paths = []
    for part in range(num_parts):
        own = {
            "split.no": part,
            "split.count": num_parts,
            "split.tensors.count": len(names),
        }
        if part == 0:
            own = {**metadata, **own}
        name = f"{path.name}-{part + 1:05}-of-{num_parts:05}.gguf"
        chosen = {name: tensors[name] for name in names[part::num_parts]}
        paths.append(write_gguf(path.with_name(name), own, chosen))
    return paths


EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The file with a few of its bytes changed, cut off, doubled, or overwritten by a number."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(changed) or 1)
        match rng.randrange(5):
            case 0:
                del changed[place:]
            case 1:
                changed[place : place + 1] = bytes([rng.randrange(256)])
            case 2:
                changed[place : place + 8] = struct.pack("<Q", rng.choice(EXTREMES))
            case 3:
                changed[place : place + 4] = struct.pack("<I", rng.choice(EXTREMES) % 2**32)
            case 4:
                changed[place:place] = changed[place : place + rng.randint(1, 40)]
    return bytes(changed)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case np.ndarray():
            number = {"f": 6, "i": 5, "b": 7}[value.dtype.kind]
            data = value.astype({6: "<f4", 5: "<i4", 7: "u1"}[number]).tobytes()
            return struct.pack("<IIQ", 9, number, len(value)) + data
        case Sequence():
            texts = b"".join(map(_text, value))
            return struct.pack("<IIQ", 9, 8, len(value)) + texts
    raise TypeError(type(value))
