"""The placeholders of pictures, videos and sounds in one prompt, and the positions of their tokens
in time, height and width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.arrays import FloatArray, IntArray
from weft.messages.media import MediaItem
from weft.messages.requests import GenerateRequest
from weft.plan.inputs import EncoderInput, MediaValues

VALUE_BYTES = 4  # float32
DIGEST_BYTES = 32


class PlacedInput(NamedTuple):
    """One item for the encoder, and the position of its tokens in the prompt."""

    start: int
    end: int
    input: EncoderInput
    line_len: int  # as in `MediaItem`

    def vectors(self, start: int, end: int) -> tuple[IntArray, IntArray]:
        """The tokens from `start` to `end` of the prompt that take vectors, counted from `start`,
        and the index of each vector."""
        places = np.arange(start - self.start, end - self.start, dtype=np.int32)
        rows = places
        if self.line_len:
            # [v v v] break [v v v] break ..: each break before a token reduces the index of its
            # vector by 1.
            step = self.line_len + 1
            places = places[places % step != self.line_len]
            rows = places - places // step
        return places - np.int32(start - self.start), rows


class MediaPositions(NamedTuple):
    """The positions by which the tokens of a prompt are rotated (M-RoPE, arXiv:2409.12191, section
    2.1).

        text         all three increase with every token
        t x h x w    token (i, j, k) has p + (i · time step, j, k) after p tokens of text
        text         continues after the largest position so far
    """

    prompt: IntArray  # [3, prompt_len] in time, height and width
    shift: int  # added to the index of tokens after the prompt


@dataclass(frozen=True)
class MediaPrompt:
    """The items and positions of one prompt."""

    items: tuple[PlacedInput, ...]  # in the order of the prompt
    positions: MediaPositions | None  # None: the model has one position per token
    is_heard: bool = False  # all tokens attend to the items, which have no tokens themselves

    def within(self, start: int, end: int) -> Iterator[PlacedInput]:
        """The items with tokens in the range from `start` to `end`."""
        for item in self.items:
            if item.start < end and item.end > start:
                yield item


def read_prompt(message: GenerateRequest, *, has_three_positions: bool) -> MediaPrompt:
    """The items of a request that was not refused."""
    items: list[PlacedInput] = []
    for one in message.media:
        values = MediaValues(_values(one))
        given = EncoderInput(one.digest, one.kind, one.num_vectors, one.grid, values)
        items.append(PlacedInput(one.start, one.end, given, one.line_len))
    positions = None
    if has_three_positions:
        prompt_len = message.prompt_len
        positions = three_positions(message.media, prompt_len)
    is_heard = any(item.num_heard for item in message.media)
    return MediaPrompt(tuple(items), positions, is_heard=is_heard)


def _values(item: MediaItem) -> FloatArray:
    """The array that the encoder reads. If its size does not fit the shape, it stays flat and the
    encoder fails; no error is raised here, because replays have no values."""
    values_bytes = item.values[: len(item.values) // VALUE_BYTES * VALUE_BYTES]
    values = np.frombuffer(values_bytes, dtype=np.float32)
    if math.prod(item.shape) == len(values):
        return values.reshape(item.shape)
    return values


def three_positions(media: Sequence[MediaItem], prompt_len: int) -> MediaPositions:
    """The positions of a prompt of `prompt_len` tokens."""
    pieces: list[IntArray] = []
    begin = 0  # tokens so far
    first = 0  # the next position
    for item in media:
        num_before = item.start - begin
        pieces.append(_in_a_line(first, num_before))
        first += num_before
        own = _in_a_line(first, item.length)
        if item.grid is not None and not item.line_len:
            own = _in_a_grid(first, item.grid, item.time_step)
        pieces.append(own)
        first = int(own.max()) + 1
        begin = item.end
    pieces.append(_in_a_line(first, prompt_len - begin))
    shift = first - begin
    return MediaPositions(np.concatenate(pieces, axis=1), shift)


def _in_a_line(first: int, length: int) -> IntArray:
    line = np.arange(first, first + length, dtype=np.int32)
    return np.tile(line, (3, 1))


def _in_a_grid(first: int, grid: tuple[int, int, int], time_step: float) -> IntArray:
    num_frames, height, width = grid
    steps = np.arange(num_frames, dtype=np.float32) * np.float32(time_step)
    frames = steps.astype(np.int32)  # rounded down
    rows = np.arange(height, dtype=np.int32)
    columns = np.arange(width, dtype=np.int32)
    places = np.meshgrid(frames, rows, columns, indexing="ij")
    return np.stack([axis.ravel() for axis in places]) + np.int32(first)


def wrong_heard(message: GenerateRequest, heard_len: int) -> str:
    """Why a request for a model whose tokens attend to a sound has not what it needs; empty if it
    has."""
    if len(message.media) != 1:
        return f"this model needs one sound with each prompt; this one has {len(message.media)}"
    (item,) = message.media
    if len(item.digest) != DIGEST_BYTES:
        return f"the sound has a digest of {len(item.digest)} bytes; {DIGEST_BYTES} are needed"
    if item.start or item.length or item.line_len or item.grid or item.num_heard != heard_len:
        return (
            f"the sound has {item.length:,} tokens and {item.num_heard:,} vectors; this model "
            f"reads {heard_len:,} vectors that have no tokens"
        )
    return ""


def wrong_media(message: GenerateRequest) -> str:
    """Why the items of a request do not fit its prompt; empty if they fit."""
    prompt_len = message.prompt_len
    begin = 0
    for number, item in enumerate(message.media):
        name = f"media item {number} ({item.kind})"
        if len(item.digest) != DIGEST_BYTES:
            return f"{name} has a digest of {len(item.digest)} bytes; {DIGEST_BYTES} are needed"
        if item.length < 1 or item.start < begin or item.end > prompt_len:
            return (
                f"{name} has tokens {item.start:,} to {item.end:,}; "
                f"{begin:,} to {prompt_len:,} are left for it"
            )
        if item.line_len < 0 or (item.line_len and (item.length + 1) % (item.line_len + 1)):
            return f"{name} has {item.length:,} tokens, which are not lines of {item.line_len:,}"
        if item.grid is not None:
            num_frames = item.grid[0]
            if min(item.grid) < 1 or math.prod(item.grid) != item.num_vectors:
                return f"{name} has a grid of {item.grid}, which is not {item.num_vectors:,} tokens"
            if not 0 <= (num_frames - 1) * item.time_step < item.length:
                return (
                    f"{name} has {num_frames:,} frames with {item.time_step:g} positions between "
                    f"two; the last must be at 0 to {item.length - 1:,}"
                )
        begin = item.end
    return ""
