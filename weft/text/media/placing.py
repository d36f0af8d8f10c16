"""Places pictures, videos and sounds in a prompt: first in its text, then in its tokens.

    text     What is <image> and <image>?           a mark for each, as the template writes it
    ready    What is [i][i][i] and [i][i]?          `PreparedMedia.text` instead of each mark
    tokens   500 501  9 9 9  502  9 9  503          runs of placeholders: the positions of the parts

If a text of the user also contains a mark or a placeholder, the counts differ, and the request is
refused, because the two cannot be distinguished.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from weft.arrays import FloatArray
from weft.config.numbers import counted
from weft.messages.media import MediaItem, MediaKind
from weft.text.media.errors import MediaError
from weft.text.media.processor import MediaPart, PreparedMedia, require_item_size

VECTORS_PER_S = 50  # of a sound to which all tokens attend; its values have two frames for each

NAMES: dict[MediaKind, tuple[str, str]] = {
    "image": ("image", "images"),
    "video": ("video", "videos"),
    "audio": ("sound", "sounds"),
}


class ReadyMedia(NamedTuple):
    """One picture, video or sound as the engine gets it, without its position in a prompt."""

    kind: MediaKind
    text: str  # replaces its mark
    items: tuple[MediaItem, ...]  # in the order of their placeholders; `start` is still 0

    @property
    def num_tokens(self) -> int:
        return sum(item.length for item in self.items)

    @property
    def num_bytes(self) -> int:
        return len(self.text) + sum(len(item.values) for item in self.items)


def ready(kind: MediaKind, prepared: PreparedMedia) -> ReadyMedia:
    """The prepared media with packed values and their digests."""
    bare, arrays = described(kind, prepared)
    return with_values(bare, [array.tobytes() for array in arrays])


def described(kind: MediaKind, prepared: PreparedMedia) -> tuple[ReadyMedia, list[FloatArray]]:
    """The prepared media without their values, and these, one contiguous array for each item.
    Raises `MediaError` if they are too large."""
    items: list[MediaItem] = []
    arrays: list[FloatArray] = []
    for part in prepared.parts:
        values = np.ascontiguousarray(part.values, dtype="<f4")
        items.append(_item(part, values))
        arrays.append(values)
    return ReadyMedia(kind, prepared.text, tuple(items)), arrays


def with_values(bare: ReadyMedia, values: Iterable[bytes]) -> ReadyMedia:
    """The media with the packed values of their items, in order."""
    pairs = zip(bare.items, values, strict=True)
    return bare._replace(items=tuple(replace(item, values=own) for item, own in pairs))


def _item(part: MediaPart, values: FloatArray) -> MediaItem:
    require_item_size(values.nbytes)
    head = f"{part.kind} {part.grid} {part.time_step} {part.length} {values.shape}\n"
    if part.line_len:
        head = f"lines of {part.line_len} {head}"
    if part.num_heard:
        head = f"heard as {part.num_heard} {head}"
    digest = hashlib.sha256(head.encode())
    digest.update(values.data)
    return MediaItem(
        kind=part.kind,
        digest=digest.digest(),
        start=0,
        length=part.length,
        line_len=part.line_len,
        num_heard=part.num_heard,
        seconds=part.seconds,
        grid=part.grid,
        time_step=part.time_step,
        shape=values.shape,
    )


def count(number: int, kind: MediaKind) -> str:
    """ "1 image", "2 sounds"."""
    return f"{number:,} {NAMES[kind][number != 1]}"


def in_text(
    text: str,
    marks: Mapping[MediaKind, str],
    media: Sequence[ReadyMedia],
) -> tuple[str, list[ReadyMedia]]:
    """Replace each mark in `text` by the text of its media. Returns the text, and the media in the
    order of their marks.

    Raises `MediaError` unless there is exactly one mark for each.
    """
    by_mark: dict[str, list[ReadyMedia]] = {}
    for kind, mark in marks.items():
        own = [one for one in media if one.kind == kind]
        if own:
            by_mark.setdefault(mark, []).extend(own)
    pieces: list[str] = []
    in_order: list[ReadyMedia] = []
    end = 0
    if by_mark:
        # One mark may be a prefix of another: the longer mark matches first.
        longest_first = sorted(by_mark, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)))
        found = list(pattern.finditer(text))
        for mark, waiting in by_mark.items():
            num_marks = sum(match[0] == mark for match in found)
            if num_marks != len(waiting):
                wanted = count(len(waiting), waiting[0].kind)
                raise MediaError(
                    f"the prompt has the mark {mark!r} {counted(num_marks, 'time')} for {wanted}; "
                    "texts may not have it themselves, and a prompt without a chat template has to"
                )
        waiting_of = {mark: iter(waiting) for mark, waiting in by_mark.items()}
        for match in found:
            one = next(waiting_of[match[0]])
            pieces += (text[end : match.start()], one.text)
            in_order.append(one)
            end = match.end()
    pieces.append(text[end:])
    return "".join(pieces), in_order


def in_tokens(
    ids: Sequence[int],
    placeholders: Mapping[MediaKind, int],
    media: Sequence[ReadyMedia],
) -> tuple[MediaItem, ...]:
    """The parts of `media`, each with the position of its run of placeholders in `ids`.

    `media` are in the order of the prompt. Raises `MediaError` unless the runs have exactly the
    lengths of the parts.
    """
    numbers = np.asarray(ids)
    by_token: dict[int, list[MediaItem]] = {}
    for one in media:
        for item in one.items:
            if item.num_heard:
                _require_one_window(item)
                continue
            by_token.setdefault(placeholders[item.kind], []).append(item)
    # What all tokens attend to has no place among them.
    placed: list[MediaItem] = [item for one in media for item in one.items if item.num_heard]
    for token, items in by_token.items():
        positions = np.flatnonzero(numbers == token)
        needed = sum(item.num_vectors for item in items)
        if len(positions) != needed:
            raise MediaError(
                f"the prompt has {len(positions):,} tokens that stand for parts of media "
                f"(id {token}) where its {len(items):,} parts need {needed:,}; texts may not have "
                "them"
            )
        begin = 0
        for item in items:
            own = positions[begin : begin + item.num_vectors]
            begin += item.num_vectors
            found = replace(item, start=int(own[0]))
            wanted = np.concatenate([np.arange(*line) for line in found.lines])
            if not np.array_equal(own, wanted):
                runs = "one run"
                if item.line_len:
                    runs = f"runs of {item.line_len:,} with one token between two of them"
                raise MediaError(
                    f"the prompt has something among the {item.num_vectors:,} tokens that stand "
                    f"for one part of media (id {token}), which have to be {runs}"
                )
            placed.append(found)
    return tuple(sorted(placed, key=_start))


def _require_one_window(item: MediaItem) -> None:
    """Raise `MediaError` for a sound that is longer than what all tokens can attend to."""
    longest = item.num_heard / VECTORS_PER_S
    seconds = item.shape[-1] / (2 * VECTORS_PER_S)
    if seconds > longest:
        raise MediaError(
            f"the sound lasts {seconds:g} s; a prompt takes at most {longest:g} s of it (POST "
            "/v1/audio/transcriptions takes longer ones)"
        )


def _start(item: MediaItem) -> int:
    return item.start
