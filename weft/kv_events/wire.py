"""Batches of events as bytes, as vLLM and SGLang write them.

    frames    topic, sequence number (8 bytes, big endian), payload
    payload   msgpack: [time in unix seconds, [event, ...], rank]
    event     "map"     {"type": "BlockStored", "block_hashes": [...], ...}    today's vLLM, SGLang
              "array"   ["BlockStored", [...], ...]                            theirs of before

Where a field is what it would be by default, a map leaves it out. Source: vLLM
`distributed/kv_events.py`, SGLang `srt/disaggregation/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

MEDIUM = "GPU"  # the readers' word for memory that the model computes in, whatever it is
SEQUENCE_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES

ExtraKeys: TypeAlias = list[list[str] | None]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True, frozen=True):
    """Blocks that are cached now, each behind the one before, the first behind its parent."""

    block_hashes: list[int]
    parent_block_hash: int | None  # None: it begins a sequence
    token_ids: list[int]  # of all blocks
    block_size: int
    lora_id: int | None  # a field of before; always None
    medium: str | None
    lora_name: str | None  # uid of the adapter
    # For each block what its hash depends on besides the tokens: adapter, and, for the first
    # block of a sequence, the salt.
    extra_keys: ExtraKeys | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True, frozen=True):
    """Blocks that are not cached any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Nothing is cached any more."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

_encode = msgspec.msgpack.Encoder().encode


def encode_batch(
    events: Sequence[CacheEvent],
    *,
    unix_s: float,
    rank: int,
    encoding: str,
) -> bytes:
    """The payload of a batch. `encoding` is one of `config.kv_events.ENCODINGS`."""
    content: Sequence[Any] = events
    if encoding == "array":
        content = [_as_array(event) for event in events]
    return _encode([unix_s, content, rank])


def encode_sequence(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")


def _as_array(event: CacheEvent) -> list[Any]:
    """The fields that readers of arrays know, in their order."""
    match event:
        case BlockStored():
            return [
                "BlockStored",
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                event.lora_id,
                event.medium,
                event.lora_name,
            ]
        case BlockRemoved():
            return ["BlockRemoved", event.block_hashes, event.medium]
    return ["AllBlocksCleared"]
