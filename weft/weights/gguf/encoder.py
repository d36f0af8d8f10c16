"""The GGUF file of an encoder (mmproj) as `Content`: its tensors under the names of weft's towers.

Where a tower has one tensor and the file several, the content has places after the end of the
file: what is read there comes from the tensors of the file, one after the other, or was joined in
memory when the file was opened.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.config.model import BadCheckpoint
from weft.config.vision.clip import LayerGroup, Projector
from weft.config.vision.mmproj import ARCHITECTURE, IGNORED, projector_of
from weft.json_types import JsonMapping
from weft.weights.gguf.reader import GgufFile
from weft.weights.safetensors import TensorEntry

PATCHES = "v.patch_embd.weight"
MAX_JOINED_BYTES = 256_000_000
QKV = ("attn_q", "attn_k", "attn_v")


class FilePiece(NamedTuple):
    """Bytes at a place after the end of the file."""

    begin: int
    num_bytes: int
    start: int  # in the file
    data: bytes | None = None  # instead of bytes of the file


class EncoderContent(GgufFile):
    """The file of an encoder, closed at the end of a `with` block."""

    def __init__(self, path: Path, label: str = "") -> None:
        """Raises BadCheckpoint and UnsupportedModel."""
        super().__init__(path, label)
        self._segments: list[FilePiece] = []
        self._end = self.num_bytes
        try:
            self.entries = self._renamed()
        except BaseException:
            self.close()
            raise

    def read_into(self, start: int, target: memoryview) -> None:
        if start < self.num_bytes or not target:
            super().read_into(start, target)
            return
        index = bisect_right(self._segments, start, key=lambda one: one.begin) - 1
        done = 0
        while done < len(target):
            if index >= len(self._segments):
                raise BadCheckpoint(f"{self.label} is damaged: it ends in the middle of a tensor")
            segment = self._segments[index]
            offset = start + done - segment.begin
            num = min(segment.num_bytes - offset, len(target) - done)
            part = target[done : done + num]
            if segment.data is None:
                super().read_into(segment.start + offset, part)
            else:
                part[:] = segment.data[offset : offset + num]
            done += num
            index += 1

    def _renamed(self) -> dict[str, TensorEntry]:
        tensors = self.header.tensors
        metadata = self.header.metadata
        projector = projector_of(self.label, metadata)
        swaps = _is_swapped(tensors)
        found: dict[str, TensorEntry] = {}
        for name, entry in tensors.items():
            if name.startswith(IGNORED) or name.startswith(f"{PATCHES}."):
                continue
            part = self._patches(tensors, projector) if name == PATCHES else entry
            if name.endswith(projector.numbers) and part.shape == (1,):
                part = part._replace(shape=())
            if name.endswith(projector.vectors):
                part = part._replace(shape=(math.prod(part.shape),))
            if name.endswith(projector.convs) and len(part.shape) == 2:
                num, size = part.shape
                part = part._replace(shape=(num, 1, size))
            if projector.merges_qkv and _is_of(name, QKV):
                if not _is_of(name, QKV[:1]):
                    continue
                part = self._joined(name, tensors)
                name = name.replace(".attn_q.", ".attn_qkv.")
            ours = _tower_name(name, projector, swaps, metadata) or name
            rows = _paired_rows(name, part, projector, metadata)
            found[ours] = part._replace(name=ours, paired_rows=rows)
        return found

    def _joined(self, name: str, tensors: Mapping[str, TensorEntry]) -> TensorEntry:
        """Queries, keys and values, one below the other. Raises BadCheckpoint."""
        parts: list[TensorEntry] = []
        for kind in QKV:
            entry = tensors.get(name.replace(".attn_q.", f".{kind}."))
            first = parts[0] if parts else entry
            if (
                entry is None
                or first is None
                or (entry.dtype, entry.shape[1:])
                != (
                    first.dtype,
                    first.shape[1:],
                )
            ):
                raise BadCheckpoint(
                    f"{self.label} is damaged: {name[:200]} has no {kind} of its type and inputs"
                )
            parts.append(entry)
        begin = self._end
        for entry in parts:
            self._append(FilePiece(self._end, entry.num_bytes, entry.start))
        num_rows = sum(entry.shape[0] for entry in parts)
        return parts[0]._replace(
            shape=(num_rows, *parts[0].shape[1:]), start=begin, num_bytes=self._end - begin
        )

    def _patches(self, tensors: Mapping[str, TensorEntry], projector: Projector) -> TensorEntry:
        """The projection of patches; of several frames, if the file has a tensor for each."""
        first = tensors[PATCHES]
        if projector.patches_by_pixel:
            return self._by_pixel(first)
        frames = [first]
        while f"{PATCHES}.{len(frames)}" in tensors:
            frames.append(tensors[f"{PATCHES}.{len(frames)}"])
        if len(frames) == 1:
            return first
        num_bytes = sum(entry.num_bytes for entry in frames)
        is_same = len({(entry.dtype, entry.shape) for entry in frames}) == 1
        if not is_same or len(first.shape) != 4 or num_bytes > MAX_JOINED_BYTES:
            raise BadCheckpoint(
                f"{self.label} is damaged: {PATCHES} and those of later frames are not alike, or "
                f"have {num_bytes:,} bytes"
            )
        out_size, num_colours, *_ = first.shape
        pieces = []
        for entry in frames:
            data = bytearray(entry.num_bytes)
            super().read_into(entry.start, memoryview(data))
            pieces.append(np.frombuffer(data, np.uint8).reshape(out_size, num_colours, 1, -1))
        begin = self._end
        self._append(FilePiece(begin, num_bytes, 0, np.concatenate(pieces, axis=2).tobytes()))
        shape = (out_size, num_colours, len(frames), *first.shape[2:])
        return first._replace(shape=shape, start=begin, num_bytes=num_bytes)

    def _by_pixel(self, entry: TensorEntry) -> TensorEntry:
        """[n, colours, H, W] as [n, H * W * colours]."""
        num_items = max(math.prod(entry.shape), 1)
        item_bytes, rest = divmod(entry.num_bytes, num_items)
        if rest or len(entry.shape) != 4 or entry.num_bytes > MAX_JOINED_BYTES:
            raise BadCheckpoint(
                f"{self.label} is damaged: {PATCHES} is {entry.dtype} of {list(entry.shape)}"
            )
        data = bytearray(entry.num_bytes)
        super().read_into(entry.start, memoryview(data))
        items = np.frombuffer(data, f"V{item_bytes}")
        by_colour = items.reshape(entry.shape)
        by_pixel = by_colour.transpose(0, 2, 3, 1).tobytes()
        begin = self._end
        self._append(FilePiece(begin, entry.num_bytes, 0, by_pixel))
        size = math.prod(entry.shape[1:])
        return entry._replace(shape=(entry.shape[0], size), start=begin)

    def _append(self, segment: FilePiece) -> None:
        self._segments.append(segment)
        self._end += segment.num_bytes


def is_encoder(path: Path) -> bool:
    """Whether a GGUF file is that of an encoder. Raises BadCheckpoint and UnsupportedModel."""
    with GgufFile(path) as file:
        return file.header.metadata.get("general.architecture") == ARCHITECTURE


def _is_of(name: str, parts: tuple[str, ...]) -> bool:
    """Whether a tensor is one of these parts of a layer."""
    return name.startswith("v.blk.") and name.split(".")[3:4] in [[part] for part in parts]


def _is_swapped(tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether the two products of a feed-forward part have each other's names, as older converters
    wrote them."""
    down = tensors.get("v.blk.0.ffn_down.weight")
    norm = tensors.get("v.blk.0.ln1.weight")
    if down is None or norm is None or len(down.shape) != 2:
        return False
    return down.shape[0] != math.prod(norm.shape)


def _tower_name(name: str, projector: Projector, swaps: bool, metadata: JsonMapping) -> str:
    """The tower's name of a tensor; "": it has none."""
    base, _, kind = name.rpartition(".")
    for known in (name, base):
        if known in projector.outside:
            return projector.outside[known] + (f".{kind}" if known == base else "")
    group, _, rest = base.partition(".blk.")
    layer, _, part = rest.partition(".")
    groups = {
        "v": LayerGroup(projector.layers, projector.parts),
        **projector.further,
    }
    if group in groups and layer.isascii() and layer.isdigit():
        if swaps:
            part = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(part, part)
        layers, parts = groups[group]
        prefix = f"{layers}.{int(layer)}"
        if parts is None:
            return f"{prefix}.{part}.{kind}"
        unsplit = parts.get(f"{part}.{kind}", "")
        if unsplit:
            return f"{prefix}.{unsplit}"
        ours = parts.get(part, "")
        return f"{prefix}.{ours}.{kind}" if ours else ""
    group, _, rest = base.partition(".deepstack.")
    layer, _, part = rest.partition(".")
    if group == "v" and layer.isascii() and layer.isdigit() and part in projector.deep:
        index = _deep_layers(metadata).get(int(layer))
        if index is not None:
            return f"visual.deepstack_merger_list.{index}.{projector.deep[part]}.{kind}"
    return ""


def _deep_layers(metadata: JsonMapping) -> dict[int, int]:
    """The layers after which further vectors are taken, and which of them each is."""
    flags = metadata.get("clip.vision.is_deepstack_layers")
    if not isinstance(flags, np.ndarray):
        return {}
    layers: list[int] = np.flatnonzero(flags).tolist()
    return {layer: index for index, layer in enumerate(layers)}


def _paired_rows(name: str, entry: TensorEntry, projector: Projector, metadata: JsonMapping) -> int:
    """Like those of the decoder (`names.py`)."""
    num_heads = metadata.get("clip.vision.attention.head_count")
    if not projector.has_pairs or not _is_of(name, QKV[:2]):
        return 0
    if not isinstance(num_heads, int) or num_heads < 1 or entry.shape[0] % (2 * num_heads):
        return 0
    return entry.shape[0] // num_heads
