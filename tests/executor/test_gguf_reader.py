"""Headers of GGUF files: what is written is read, and what lies is refused in bounded memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.executor.gguf_files import Stored, damaged, gguf_bytes, plain, random_blocks, write_gguf
from weft.config.model import BadCheckpoint, ModelError, UnsupportedModel
from weft.weights.gguf.reader import MAX_HEADER_BYTES, GgufFile

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 0.5,
    "flag": True,
    "texts": ["a", "", "ü ▁", "b" * 300],
    "numbers": np.array([3, -1, 7], dtype=np.int32),
    "scores": np.array([0.5, -2.0], dtype=np.float32),
}
TENSORS = {
    "norm": plain(torch.arange(5.0)),
    "half": plain(torch.ones(3, 4, dtype=torch.float16)),
    "blocks": random_blocks("Q4_K", (2, 256)),
}


def read(tmp_path: Path, data: bytes) -> GgufFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return GgufFile(path)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with GgufFile(write_gguf(tmp_path / "model.gguf", METADATA, TENSORS)) as file:
        metadata = dict(file.header.metadata)
        assert list(metadata.pop("texts")) == METADATA["texts"]
        assert metadata.pop("numbers").tolist() == [3, -1, 7]
        assert metadata.pop("scores").tolist() == [0.5, -2.0]
        names = ("general.architecture", "llama.block_count", "llama.rope.freq_base", "flag")
        assert metadata == {name: METADATA[name] for name in names}
        tensors = file.header.tensors
        assert {name: entry.shape for name, entry in tensors.items()} == {
            "norm": (5,),
            "half": (3, 4),
            "blocks": (2, 256),
        }
        assert [entry.dtype for entry in tensors.values()] == ["F32", "F16", "Q4_K"]
        for name, entry in tensors.items():
            data = bytearray(entry.num_bytes)
            file.read_into(entry.start, memoryview(data))
            assert bytes(data) == TENSORS[name].data


def test_a_header_longer_than_one_read_is_read(tmp_path: Path) -> None:
    texts = [f"token {index}" for index in range(200_000)]
    with GgufFile(write_gguf(tmp_path / "model.gguf", {"texts": texts}, {})) as file:
        assert list(file.header.metadata["texts"]) == texts


def key(kind: int, value: bytes) -> bytes:
    """A file with one key."""
    return (
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
        + struct.pack("<Q", 1)
        + b"k"
        + struct.pack("<I", kind)
        + value
    )


def tensors(*entries: tuple[str, tuple[int, ...], int, int], size: int = 1024) -> bytes:
    """A file with tensors: name, dimensions, type, offset; and `size` bytes for them."""
    data = struct.pack("<4sIQQ", b"GGUF", 3, len(entries), 0)
    for name, sizes, kind, offset in entries:
        data += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(sizes))
        data += b"".join(struct.pack("<Q", one) for one in sizes)
        data += struct.pack("<IQ", kind, offset)
    return data + b"\0" * (-len(data) % 32 + size)


LIES = {
    "nothing": b"",
    "other file": b"PK\3\4" + bytes(100),
    "version 1": struct.pack("<4sIQQ", b"GGUF", 1, 0, 0),
    "big-endian": struct.pack(">4sIQQ", b"GGUF", 3, 0, 0),
    "ends in numbers": struct.pack("<4sIQ", b"GGUF", 3, 0),
    "2^63 tensors": struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 0),
    "2^63 keys": struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63),
    "key without end": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 2**63),
    "key not UTF-8": struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1) + b"\xff" + bytes(8),
    "unknown type of value": key(99, bytes(8)),
    "string of 2^63": key(8, struct.pack("<Q", 2**63)),
    "array of 2^63 strings": key(9, struct.pack("<IQ", 8, 2**63)),
    "array of 2^61 numbers": key(9, struct.pack("<IQ", 12, 2**61)),
    "array of arrays": key(9, struct.pack("<IQ", 9, 1) + bytes(64)),
    "string in an array of 2^63": key(9, struct.pack("<IQQ", 8, 1, 2**63)),
    "no dimension": tensors(("a", (), 0, 0)),
    "9 dimensions": tensors(("a", (1,) * 9, 0, 0)),
    "an empty tensor": tensors(("a", (0, 5), 0, 0)),
    "2^63 weights": tensors(("a", (2**63, 2**63), 0, 0)),
    "beyond the end": tensors(("a", (512,), 0, 0)),
    "an offset of 2^63": tensors(("a", (4,), 0, 2**63)),
    "an odd offset": tensors(("a", (4,), 0, 4)),
    "overlapping": tensors(("a", (64,), 0, 0), ("b", (4,), 0, 32)),
    "twice": tensors(("a", (4,), 0, 0), ("a", (4,), 0, 32)),
    "half a block": tensors(("a", (16,), 2, 0)),
    "unknown type": tensors(("a", (32,), 4_000, 0)),
}


@pytest.mark.parametrize("what", LIES)
def test_what_lies_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    with pytest.raises((BadCheckpoint, UnsupportedModel)) as raised:
        read(tmp_path, LIES[what])
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("alignment", [0, 3, 2**31])
def test_alignments_that_are_none_are_refused(tmp_path: Path, alignment: int) -> None:
    data = gguf_bytes({"general.alignment": alignment}, {"a": plain(torch.ones(4))})
    with pytest.raises(BadCheckpoint, match="its alignment is"):
        read(tmp_path, data)


def test_a_header_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    """A sparse file, of zeros: a string that would fill it is not taken."""
    path = tmp_path / "model.gguf"
    path.write_bytes(key(8, struct.pack("<Q", 2 * MAX_HEADER_BYTES)))
    with path.open("r+b") as file:
        file.truncate(3 * MAX_HEADER_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(BadCheckpoint):
            GgufFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="not a regular file"):
        GgufFile(tmp_path)
    with pytest.raises(BadCheckpoint, match="cannot be opened"):
        GgufFile(tmp_path / "none.gguf")


def test_whatever_is_damaged_is_read_or_refused_in_bounded_memory(tmp_path: Path) -> None:
    whole = gguf_bytes(METADATA, TENSORS)
    header_len = whole.index(TENSORS["norm"].data)
    rng = random.Random(20_261_122)
    messages = []
    tracemalloc.start()
    try:
        for _ in range(800):
            data = damaged(whole[:header_len], rng) + whole[header_len:]
            try:
                with read(tmp_path, data) as file:
                    for value in file.header.metadata.values():
                        if hasattr(value, "__iter__"):
                            list(value)
                    for entry in file.header.tensors.values():
                        assert entry.start + entry.num_bytes <= len(data)
            except ModelError as exc:
                messages.append(str(exc))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 400 < len(messages) < 800
    assert not any("\n" in message for message in messages)
    assert peak < 5_000_000


def test_a_type_that_is_not_read_is_known_by_name(tmp_path: Path) -> None:
    stored = Stored("Q2_K", (1, 256), bytes(84))
    with GgufFile(write_gguf(tmp_path / "model.gguf", {}, {"a": stored})) as file:
        assert file.header.tensors["a"].dtype == "Q2_K"
