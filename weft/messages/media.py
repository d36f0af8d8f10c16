"""Pictures, frames of videos and sounds in a prompt, as the engine gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

MediaKind: TypeAlias = Literal["image", "video", "audio"]

ID_BYTES = 4  # of a packed token id


class MediaItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that an encoder turns into vectors. They stand in the prompt in the place of a run
    of equal placeholder tokens.

    A picture that is encoded in tiles is several of them, and so is a video whose frames have text
    between them.
    """

    kind: MediaKind
    # SHA-256 of all that its vectors and positions depend on: kind, grid, time_step, shape and
    # values. Items with the same digest have the same vectors, and K and V in the same place.
    digest: bytes
    start: int  # place of its first token in the prompt
    length: int  # tokens
    # Placeholders of a line, behind which a token of text stands that has no vector (as Pixtral
    # has it between lines of a picture); 0: every token of it has one.
    line_len: int = 0
    # How its vectors lie in time, height and width; their product is `num_vectors`. None: in a
    # line.
    grid: tuple[int, int, int] | None = None
    # Distance of two frames in positions (M-RoPE): frame i stands at the whole part of
    # i * time_step, as float32. Its last frame lies within its `length`.
    time_step: float = 1.0
    shape: tuple[int, ...] = ()  # of `values`
    values: bytes = b""  # float32, packed: what the encoder reads; journals have none

    @property
    def end(self) -> int:
        """The position after its last token in the prompt."""
        return self.start + self.length

    @property
    def num_vectors(self) -> int:
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


def told_apart(input_ids: bytes, media: Sequence[MediaItem]) -> bytes:
    """The packed ids of a prompt, with its digest, again and again, in the place of each item.

    For those who only compare prompts: with different pictures they differ from the first token of
    these on, with equal ones they do not.
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
