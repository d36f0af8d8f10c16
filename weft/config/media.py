"""What a model with an encoder asks of the scheduler for the tokens of pictures, videos and
sounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MediaRules:
    # Tokens are rotated by three positions, in time, height and width (M-RoPE).
    has_three_positions: bool = False
    # The tokens of an item see each other both ways; a step computes all of them or none.
    sees_both_ways: bool = False
    # Tokens of its longest item, where all of them are computed together. Chunks are at least so
    # long, and a page at each end; 0: not known.
    longest_whole: int = 0
    # Of the vectors that the encoder makes for one token; 0: not known.
    vector_bytes: int = 0
