"""The engine's form of pictures, frames of videos and sounds in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

MediaKind: TypeAlias = Literal["image", "video", "audio"]

ID_BYTES = 4  # of a packed token id


class MediaItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One input of an encoder. Its vectors replace a run of equal placeholder tokens in the prompt;
    or all tokens attend to them (`num_heard`), and it has no tokens.

    A picture that is encoded in tiles becomes several items, and so does a video with text between
    its frames.
    """

    kind: MediaKind
    # SHA-256 of everything that determines its vectors and positions: kind, grid, time_step, shape
    # and values. Items with the same digest have the same vectors, and at the same offset in a
    # prompt the same K and V.
    digest: bytes
    start: int  # position of its first token in the prompt
    length: int  # tokens
    # Placeholders of a line. Between two lines is a text token without a vector (Pixtral's lines
    # of a picture). 0: every token has a vector.
    line_len: int = 0
    # Vectors to which every token of the request attends; 0: vectors replace tokens.
    num_heard: int = 0
    seconds: float = 0.0  # duration of a sound that can be longer than what is heard; 0: unknown
    # [time, height, width] of its vectors; the product is `num_vectors`. None: one sequence.
    grid: tuple[int, int, int] | None = None
    # Distance of two frames in positions (M-RoPE): the position of frame i is the integer part of
    # i * time_step, in float32. The last frame is within `length`.
    time_step: float = 1.0
    shape: tuple[int, ...] = ()  # of `values`
    values: bytes = b""  # float32, packed: the input of the encoder; empty in journals

    @property
    def end(self) -> int:
        """The position after its last token in the prompt."""
        return self.start + self.length

    @property
    def num_vectors(self) -> int:
        if self.num_heard:
            return self.num_heard
        if not self.line_len:
            return self.length
        return self.length - self.length // (self.line_len + 1)

    @property
    def lines(self) -> list[tuple[int, int]]:
        """(begin, end) of each run of its placeholders in the prompt; `end` is exclusive."""
        if not self.line_len:
            return [(self.start, self.end)]
        begins = range(self.start, self.end, self.line_len + 1)
        return [(begin, begin + self.line_len) for begin in begins]


def with_digests(input_ids: bytes, media: Sequence[MediaItem]) -> bytes:
    """The packed ids of a prompt, with the tokens of each item replaced by its repeated digest.

    For comparing prompts: prompts with different pictures differ from the first token of a picture
    on, prompts with equal pictures do not.
    """
    if not media:
        return input_ids
    pieces: list[bytes] = []
    begin = 0
    for item in media:
        pieces.append(input_ids[begin : ID_BYTES * item.start])
        num_bytes = ID_BYTES * item.length
        repeats = -(-num_bytes // len(item.digest))
        pieces.append((item.digest * repeats)[:num_bytes])
        begin = ID_BYTES * item.end
    pieces.append(input_ids[begin:])
    return b"".join(pieces)
