"""An encoder without a model: its vector for a token of a picture is the id that the picture's
content gives the token in keys of the prefix cache. So outputs depend on pictures, and a cached
page that is found by a wrong picture differs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np

from weft.arrays import IntArray
from weft.memory.media.ids import content_ids
from weft.messages.media import MediaItem
from weft.plan.inputs import MediaVectors
from weft.plan.step import Plan, find
from weft.scheduler.request import Request

PLACEHOLDER = 1  # the id of tokens that stand for pictures
NOTHING = 9  # what a picture is read as that could not be encoded


def content_of(item: MediaItem) -> list[int]:
    """What the tokens of an item are. It calls nothing of the core in which a fault may be
    planted."""
    content = item.digest + repr((item.length, item.grid, item.time_step)).encode()
    ids = np.frombuffer(content_ids(content, item.length), dtype=np.int32).tolist()
    assert len(set(ids)) == item.length
    assert max(ids) < 0
    return ids


def with_content(prompt: list[int], media: Sequence[MediaItem]) -> list[int]:
    """A prompt as the device reads it."""
    read = list(prompt)
    for item in media:
        read[item.start : item.start + item.length] = content_of(item)
    return read


class MediaOracle:
    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.contents: dict[bytes, list[int]] = {}  # of all items that were ever sent
        self.held: dict[bytes, int] = {}  # lengths, by digest
        self.num_runs = Counter[bytes]()
        self.broken: set[bytes] = set()  # cannot be encoded
        self._errors: OrderedDict[bytes, str] = OrderedDict()
        self.most_held = 0
        self.num_ahead = 0  # items that were encoded behind steps
        # What is being encoded, and how many pieces of that are done.
        self._open: tuple[bytes, int] = (b"", 0)

    def learn(self, media: Sequence[MediaItem]) -> None:
        for item in media:
            self.contents[item.digest] = content_of(item)

    def follow(self, plan: Plan, *, is_in_doubt: bool) -> IntArray:
        """The tokens of a step, with vectors in the place of ids."""
        op = find(plan.inputs, MediaVectors)
        self._errors.clear()
        if op is None:
            return plan.tokens
        if op.drops_all:
            self.held.clear()
        for digest in op.drop:
            self.held.pop(digest, None)
        for one in op.encode:
            if one.digest in self.held:
                continue  # since a step whose result the scheduler had not seen
            assert one.values is None or one.values.array.shape == (1,), (
                "values are not those of the item"
            )
            self.held[one.digest] = one.length
            self.num_runs[one.digest] += 1
        assert len(set(op.items)) == len(op.items)
        assert set(op.item.tolist()) == set(range(len(op.items)))
        tokens = plan.tokens.copy()
        for index, item, row in zip(
            op.index.tolist(), op.item.tolist(), op.row.tolist(), strict=True
        ):
            digest = op.items[item]
            assert plan.tokens[index] == PLACEHOLDER
            assert digest in self.held or is_in_doubt, "an item is taken that is not there"
            tokens[index] = self.contents[digest][row]
            if digest in self.broken:
                tokens[index] = NOTHING
                self._errors[digest] = "the image encoder failed (Broken)"
        num_held = sum(self.held.values())
        needed = sum(len(self.contents[digest]) for digest in op.items)
        self.most_held = max(self.most_held, num_held)
        # A prompt that is open has at most what one step takes, too.
        assert num_held <= max(self.max_tokens, 2 * needed + 40) or is_in_doubt
        return tokens

    def work_ahead(self, plan: Plan) -> tuple[bytes, ...]:
        """One piece of the work behind a step; the longest items have three."""
        if plan.ahead is None:
            return ()
        assert plan.ahead.seconds >= 0
        assert len({one.digest for one in plan.ahead.encode}) == len(plan.ahead.encode)
        missing = [one for one in plan.ahead.encode if one.digest not in self.held]
        if missing:
            one = missing[0]
            digest, num_done = self._open
            num_done = num_done + 1 if digest == one.digest else 1
            self._open = (one.digest, num_done)
            if num_done > one.length % 3:
                self.held[one.digest] = one.length
                self.num_runs[one.digest] += 1
                self.num_ahead += 1
                self._open = (b"", 0)
        return tuple(one.digest for one in plan.ahead.encode if one.digest in self.held)

    def take_errors(self) -> tuple[tuple[bytes, str], ...]:
        return tuple(self._errors.items())


def expected_positions(length: int, media: Sequence[MediaItem]) -> list[tuple[int, int, int]]:
    """By which the first tokens of a sequence are rotated: written down one by one."""
    found: list[tuple[int, int, int]] = []
    starts = {item.start: item for item in media}
    behind = 0  # what follows the largest so far
    while len(found) < length:
        item = starts.get(len(found))
        own = [(behind,) * 3]
        if item is not None and item.grid is None:
            own = [(behind + i,) * 3 for i in range(item.length)]
        elif item is not None and item.grid is not None:
            frames, height, width = item.grid
            own = []
            for i in range(frames):
                for j in range(height):
                    for k in range(width):
                        own.append((behind + int(i * item.time_step), behind + j, behind + k))
        found += own
        behind = max(max(one) for one in own) + 1
    return found[:length]


def check_plan(
    plan: Plan, requests: Sequence[Request | None], *, rotates: bool, sees_both_ways: bool
) -> None:
    """The positions of a plan's tokens, and that no step has a part of what must be whole.
    `requests` by row."""
    if plan.drafting is not None:  # a second model, which sees no pictures
        assert plan.rotation is None
        assert plan.sees_to is None
        return
    positions: list[tuple[int, int, int]] = []
    sees_to: list[int] = []
    is_plain = True
    for row, start, length in zip(
        plan.rows.tolist(), plan.starts.tolist(), plan.lens.tolist(), strict=True
    ):
        request = requests[row]
        media = () if request is None else request.message.media
        own = expected_positions(start + length, media)[start:]
        positions += own
        is_plain &= own == [(i, i, i) for i in range(start, start + length)]
        sees = list(range(start + 1, start + length + 1))
        for item in media:
            first = item.start
            last = item.start + item.length
            if first < start + length and last > start and sees_both_ways:
                assert start <= first, "a piece begins inside an item"
                assert last <= start + length, "a piece ends inside an item"
                sees[first - start : last - start] = [last] * item.length
        sees_to += sees
    if not rotates or plan.rotation is None:
        assert plan.rotation is None
        assert is_plain or not rotates
    else:
        assert [tuple(one) for one in plan.rotation.T.tolist()] == positions
        assert plan.rotation.dtype == np.int32
    if plan.sees_to is None:
        assert not sees_both_ways or sees_to == [i + 1 for i in _places(plan)]
    else:
        assert plan.sees_to.tolist() == sees_to
        assert plan.sees_to.dtype == np.int32


def _places(plan: Plan) -> list[int]:
    found: list[int] = []
    for start, length in zip(plan.starts.tolist(), plan.lens.tolist(), strict=True):
        found += range(start, start + length)
    return found
