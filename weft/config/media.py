"""The scheduler's rules for the tokens of pictures, videos and sounds, in a model with an
encoder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MediaRules:
    # Tokens have three positions for the rotation: time, height and width (M-RoPE).
    has_three_positions: bool = False
    # The tokens of an item see each other both ways; a step computes all of them or none.
    sees_both_ways: bool = False
    # The kinds of items whose tokens do not, where those of others do.
    kinds_in_order: tuple[str, ...] = ()
    # Tokens of the longest item, if all tokens of an item must be computed together. A chunk has at
    # least this length plus a page at each end; 0: unknown.
    longest_unsplit: int = 0
    # Vectors of an item that every token of the request reads by cross attention, so that the item
    # has no tokens of its own, and each request has exactly one; 0: vectors replace tokens.
    heard_len: int = 0
    heard_shape: tuple[int, ...] = ()  # of the values of such an item
    # Bytes of the encoder's vectors for one token; 0: unknown.
    vector_bytes: int = 0
