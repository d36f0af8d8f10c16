"""What a stored block is found by: a chain of SHA-256 over everything that its K and V depend on.

    k0 = H(fingerprint, namespace)        ki = H(k(i-1), tokens of block i)
    the resume state after block i: H(ki, "ending")

The fingerprint is that of the model as it computes here: all bytes of its weights, its shape and
types, the kernels, and how the pool is laid out. Two fine-tunes have equal names, sizes and
headers, and no byte of the one may be found by the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from weft.memory.prefix_cache import TOKEN_BYTES, CacheKey

RESUME_STATE = b"ending"  # no tokens of a block have so few bytes
READ_BYTES = 1 << 22  # at a time, of weights


class KeyChain:
    """The keys of the blocks of one model, `block_len` tokens each."""

    def __init__(self, fingerprint: bytes, block_len: int) -> None:
        self.fingerprint = fingerprint
        self.block_bytes = block_len * TOKEN_BYTES  # of tokens

    @property
    def model(self) -> str:
        """The folder of its blocks."""
        return self.fingerprint.hex()[:16]

    def root(self, namespace: str) -> bytes:
        """What the first block of a namespace continues."""
        digest = hashlib.sha256(self.fingerprint)
        digest.update(namespace.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def keys(self, key: CacheKey) -> Iterator[bytes]:
        """The key of each whole block of a sequence, in order. Those that nobody asks for are not
        computed."""
        parent = self.root(key.namespace)
        size = self.block_bytes
        for start in range(0, len(key.tokens) - size + 1, size):
            parent = hashlib.sha256(parent + key.tokens[start : start + size]).digest()
            yield parent

    def resume_state(self, parent: bytes) -> bytes:
        """The key of the resume state after the block with the key `parent`."""
        return hashlib.sha256(parent + RESUME_STATE).digest()


def fingerprint_of(described: Sequence[str], weights: bytes) -> bytes:
    """The digest of a model from the digest of its weights, and all else that its K and V depend
    on."""
    digest = hashlib.sha256(weights)
    for text in described:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def digest_of_files(paths: Sequence[Path], remembered: Path | None) -> bytes:
    """The digest of all bytes of some files.

    What was computed once is remembered in the file `remembered`, if there is one, by path, size,
    time of change and inode. Raises OSError.
    """
    names = []
    for path in sorted(paths):
        status = path.stat()
        facts = (status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)
        names.append("|".join([str(path.resolve()), *map(str, facts)]))
    name = hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()
    known: dict[str, str] = {}
    if remembered is not None:
        known = _read(remembered)
    if name in known:
        return bytes.fromhex(known[name])
    digest = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb", buffering=0) as file:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
    known[name] = digest.hexdigest()
    if remembered is not None:
        with suppress(OSError):  # next time it is computed again
            _write(remembered, known)
    return digest.digest()


def _read(path: Path) -> dict[str, str]:
    """What is remembered; nothing if the file cannot be read, or is something else."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): bytes.fromhex(digest).hex() for name, digest in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write(path: Path, known: dict[str, str]) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(known, file)
    os.replace(beside, path)
