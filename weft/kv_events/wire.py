"""Encodes batches of events like vLLM and SGLang.

    frames    topic, sequence number (8 bytes, big endian), payload
    payload   msgpack: [time in unix seconds, [event, ...], rank]
    event     "map"     {"type": "BlockStored", "block_hashes": [...], ...}    today's vLLM, SGLang
              "array"   ["BlockStored", [...], ...]                            their older versions

A map omits fields with default values. Sources: vLLM `distributed/kv_events.py`, SGLang
`srt/disaggregation/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

MEDIUM = "GPU"  # the readers' word for the memory of the model, on any device
SEQUENCE_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES

ExtraKeys: TypeAlias = list[list[str] | None]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True, frozen=True):
    """Consecutive blocks that are cached now; the first one follows its parent."""

    block_hashes: list[int]
    parent_block_hash: int | None  # None: the first block begins a sequence
    token_ids: list[int]  # of all blocks
    block_size: int
    lora_id: int | None  # an old field; always None
    medium: str | None
    lora_name: str | None  # uid of the adapter
    # For each block, what its hash depends on besides the tokens: the adapter, and for the first
    # block of a sequence also the salt.
    extra_keys: ExtraKeys | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True, frozen=True):
    """These blocks are not cached any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """No block is cached any more."""


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
    """The fields that older readers of arrays know, in their order."""
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
