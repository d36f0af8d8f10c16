"""Reads the header of a GGUF file: metadata, and where its tensors stand. Everything is checked
before it is used.

    "GGUF" · version · number of tensors · number of keys
    · keys:    name · type · value
    · tensors: name · dimensions, the inputs first · type · offset
    · padding · the tensors, each at a multiple of the alignment

Every length is compared with the rest of the file before memory is allocated for it, so memory is
bounded by the size of the header, and that by `MAX_HEADER_BYTES`. Knows neither architectures nor
the meaning of blocks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.config.model import BadCheckpoint, UnsupportedModel
from weft.weights.regular_file import RegularFile
from weft.weights.safetensors import TensorEntry

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64_000_000
MAX_TENSORS = 200_000
MAX_KEYS = 100_000
MAX_NAME_BYTES = 1_000
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
READ_BYTES = 1 << 20  # minimum size of a read


class StoredType(NamedTuple):
    """A type of tensors: its name, and the numbers of weights and bytes of a block."""

    name: str
    size: int
    num_bytes: int


# All types of tensors, by number, including types that weft cannot read, so that errors can name
# them.
TYPES = {
    0: StoredType("F32", 1, 4),
    1: StoredType("F16", 1, 2),
    2: StoredType("Q4_0", 32, 18),
    3: StoredType("Q4_1", 32, 20),
    6: StoredType("Q5_0", 32, 22),
    7: StoredType("Q5_1", 32, 24),
    8: StoredType("Q8_0", 32, 34),
    9: StoredType("Q8_1", 32, 40),
    10: StoredType("Q2_K", 256, 84),
    11: StoredType("Q3_K", 256, 110),
    12: StoredType("Q4_K", 256, 144),
    13: StoredType("Q5_K", 256, 176),
    14: StoredType("Q6_K", 256, 210),
    15: StoredType("Q8_K", 256, 292),
    16: StoredType("IQ2_XXS", 256, 66),
    17: StoredType("IQ2_XS", 256, 74),
    18: StoredType("IQ3_XXS", 256, 98),
    19: StoredType("IQ1_S", 256, 50),
    20: StoredType("IQ4_NL", 32, 18),
    21: StoredType("IQ3_S", 256, 110),
    22: StoredType("IQ2_S", 256, 82),
    23: StoredType("IQ4_XS", 256, 136),
    24: StoredType("I8", 1, 1),
    25: StoredType("I16", 1, 2),
    26: StoredType("I32", 1, 4),
    27: StoredType("I64", 1, 8),
    28: StoredType("F64", 1, 8),
    29: StoredType("IQ1_M", 256, 56),
    30: StoredType("BF16", 1, 2),
    34: StoredType("TQ1_0", 256, 54),
    35: StoredType("TQ2_0", 256, 66),
    39: StoredType("MXFP4", 32, 17),
    40: StoredType("NVFP4", 64, 36),
}
# Types of values in the metadata, and their formats in `struct`.
_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_BOOL = 7
_STRING = 8
_ARRAY = 9


class Strings:
    """An array of strings in the metadata. It decodes strings only when it is iterated, because a
    vocabulary has hundreds of thousands."""

    def __init__(self, label: str, data: bytes, count: int) -> None:
        """`data`: `count` complete strings, each preceded by its length."""
        self._label = label
        self._data = data
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        """The strings, decoded. Raises BadCheckpoint for bytes that are not UTF-8."""
        position = 0
        for _ in range(self._count):
            [length] = struct.unpack_from("<Q", self._data, position)
            position += 8 + length
            try:
                yield self._data[position - length : position].decode()
            except UnicodeDecodeError as exc:
                raise BadCheckpoint(
                    f"{self._label} is damaged: a string of its metadata is not UTF-8"
                ) from exc


class GgufHeader(NamedTuple):
    """The content of a file's header."""

    metadata: Mapping[str, Any]  # numbers, bools, texts, `Strings`, arrays of numpy
    tensors: Mapping[str, TensorEntry]  # under the names in the file; shapes as in torch


class GgufFile(RegularFile):
    """A GGUF file and its header, closed at the end of a `with` block."""

    def __init__(self, path: Path, label: str = "") -> None:
        """`label` is the name for error messages. Raises BadCheckpoint unless it is a complete GGUF
        file, and UnsupportedModel if its version or a type of its tensors is unknown."""
        super().__init__(path, label)
        try:
            self.header = _HeaderReader(self).header()
        except BaseException:
            self.close()
            raise


class _HeaderReader:
    """Reads the header sequentially."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._label = file.label
        self._data = bytearray()  # the beginning of the file
        self._position = 0
        self._limit = min(file.num_bytes, MAX_HEADER_BYTES)

    def header(self) -> GgufHeader:
        """Read the header. Raises BadCheckpoint and UnsupportedModel."""
        if self._limit < 4 or self._take(4) != MAGIC:
            raise BadCheckpoint(f"{self._label} is not a GGUF file: it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            raise UnsupportedModel(
                f"{self._label} is GGUF of version {version}, or of big-endian machines; "
                f"supported are versions {' and '.join(map(str, VERSIONS))}, little-endian"
            )
        num_tensors = self._count(MAX_TENSORS, "tensors")
        num_keys = self._count(MAX_KEYS, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self._name()
            if name in metadata:
                raise self._damaged(f"its metadata has {name[:200]!r} twice")
            metadata[name] = self._value(self._number("<I"))
        entries = [self._tensor() for _ in range(num_tensors)]
        return GgufHeader(metadata, self._placed(entries, self._alignment(metadata)))

    def _tensor(self) -> TensorEntry:
        """Read the entry of a tensor; its `start` is the offset after the header."""
        name = self._name()
        num_dimensions = self._number("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"{name[:200]} has {num_dimensions:,} dimensions")
        sizes = [self._number("<Q") for _ in range(num_dimensions)]
        number = self._number("<I")
        offset = self._number("<Q")
        if number not in TYPES:
            raise UnsupportedModel(
                f"{self._label}: {name[:200]} is of type {number}, which is not known"
            )
        kind = TYPES[number]
        num_weights = math.prod(sizes)
        if not num_weights or sizes[0] % kind.size:
            raise self._damaged(
                f"{name[:200]} has {' x '.join(map(str, sizes))} weights of {kind.name}, "
                f"which come in blocks of {kind.size}"
            )
        num_bytes = num_weights // kind.size * kind.num_bytes
        return TensorEntry(name, kind.name, tuple(reversed(sizes)), offset, num_bytes)

    def _placed(self, entries: list[TensorEntry], alignment: int) -> dict[str, TensorEntry]:
        """The tensors by name, with their offsets in the file. Raises BadCheckpoint unless the
        offsets are inside of the file and do not overlap."""
        data_start = -(-self._position // alignment) * alignment
        placed: dict[str, TensorEntry] = {}
        end = 0
        for entry in sorted(entries, key=lambda one: one.start):
            if entry.start % alignment or entry.start < end:
                raise self._damaged(
                    f"{entry.name[:200]} begins at byte {entry.start:,} of the tensors, "
                    f"inside of another or at no multiple of {alignment}"
                )
            if entry.name in placed:
                raise self._damaged(f"it has {entry.name[:200]} twice")
            end = entry.start + entry.num_bytes
            placed[entry.name] = entry._replace(start=data_start + entry.start)
        if data_start + end > self._file.num_bytes:
            raise BadCheckpoint(
                f"{self._label} is damaged, or not downloaded to its end: "
                f"{self._file.num_bytes:,} bytes; its header says {data_start + end:,}"
            )
        return placed

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        is_number = type(alignment) is int
        if not is_number or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {str(alignment)[:64]}")
        return int(alignment)

    # Values

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _BOOL:
            return bool(self._number("<B"))
        if kind == _STRING:
            return self._text(self._limit)
        if kind == _ARRAY:
            return self._array(self._number("<I"))
        raise self._damaged(f"its metadata has a value of type {kind}")

    def _array(self, kind: int) -> Any:
        count = self._number("<Q")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _NUMBERS and kind != _BOOL:
            raise self._damaged(f"its metadata has an array of type {kind}")
        dtype = np.dtype(_NUMBERS.get(kind, "<B"))
        if count * dtype.itemsize > self._limit - self._position:
            raise self._ends_early()
        return np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)

    def _strings(self, count: int) -> Strings:
        if count * 8 > self._limit - self._position:
            raise self._ends_early()
        start = self._position
        end = start
        length_at = struct.Struct("<Q").unpack_from
        # One call per string, because a vocabulary has hundreds of thousands.
        for _ in range(count):
            if end + 8 > len(self._data):
                self._fill(end + 8)
            end += 8 + length_at(self._data, end)[0]
        self._position = start
        return Strings(self._label, self._take(end - start), count)

    def _name(self) -> str:
        """Read a name, which must be printable in one line of an error message."""
        name = self._text(MAX_NAME_BYTES)
        if not name.isprintable():
            raise self._damaged(f"the name {name[:200]!r} is none")
        return name

    def _text(self, max_bytes: int) -> str:
        length = self._number("<Q")
        if length > max_bytes:
            raise self._damaged(f"a string of its header has {length:,} bytes")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as exc:
            raise self._damaged("a string of its header is not UTF-8") from exc

    def _count(self, most: int, what: str) -> int:
        count: int = self._number("<Q")
        if count > most:
            raise self._damaged(f"it claims {count:,} {what}")
        return count

    def _number(self, form: str) -> Any:
        size = struct.calcsize(form)
        start = self._position
        self._skip(size)
        [value] = struct.unpack_from(form, self._data, start)
        return value

    def _take(self, num: int) -> bytes:
        start = self._position
        self._skip(num)
        return bytes(self._data[start : start + num])

    def _skip(self, num: int) -> None:
        """Advance by `num` bytes, and read them from the file if necessary."""
        end = self._position + num
        if end > len(self._data):
            self._fill(end)
        self._position = end

    def _fill(self, end: int) -> None:
        if end > self._limit:
            raise self._ends_early()
        had = len(self._data)
        wanted = min(max(end, had + READ_BYTES, 2 * had), self._limit)
        more = bytearray(wanted - had)
        self._file.read_into(had, memoryview(more))
        self._data += more

    def _ends_early(self) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self._label} is damaged, or not downloaded to its end: "
            f"its header ends beyond {self._limit:,} bytes"
        )

    def _damaged(self, why: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self._label} is damaged: {why}")
