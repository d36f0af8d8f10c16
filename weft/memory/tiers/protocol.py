"""Tiers: KV of cached prefixes that outlives the pool, stored in blocks of tokens.

    seek    ─▶ how much of a sequence is stored, and how long it takes to read
    fetch   ─▶ read it into pages that the caller has reserved      ─▶ Landed
    keep    ─▶ write it from pages that nobody changes meanwhile    ─▶ Written
    cancel  ─▶ soon Landed, with what was read until then; of what was to be written, nothing more
    take    ─▶ what has come to its end since

No call waits for the store, and none raises: whatever goes wrong there is less that lands. A block
is found by its key: all tokens up to its end, their namespace, and everything else that K and V
depend on. Twins: `weft/tiers/disk.py` (files in a folder), the journal's replay, `NoTiers`.

Where some layers have windows in a pool of their own, or keep a state, a sequence can be resumed
only where an *ending* is stored behind a block: the pages of the window before its end, or the
state behind it. Models without such layers have none, and can be resumed behind every block.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from weft.arrays import IntArray
from weft.memory.prefix_cache import NO_PAGES, CacheKey


class Sought(NamedTuple):
    """How much of the beginning of a sequence is stored."""

    num_tokens: int  # whole blocks, counted from the first token, up to where it can be resumed
    read_s: float  # to read what the caller lacks of it, by the rate so far


NOT_STORED = Sought(0, 0.0)


class Present(NamedTuple):
    """What is stored of a sequence, or is being written."""

    num_tokens: int  # of its beginning, whole blocks
    can_resume: bool = True  # at its end, as far as endings are concerned


NOTHING_PRESENT = Present(0)


class Landed(NamedTuple):
    """A `fetch` is over: its pages are the caller's again."""

    ticket: int
    num_tokens: int  # that the pages hold now, from the first one on; the rest holds anything
    seconds: float  # since it was asked for
    has_ending: bool = False  # all has come, also the ending that it asked for
    num_from_host: int = 0  # of these tokens, those that were in the memory of the host


class Written(NamedTuple):
    """A `keep` is over: nobody reads its pages any more."""

    ticket: int
    num_bytes: int  # that were written


class TierNews(NamedTuple):
    """What has happened since the last call of `take`."""

    landed: tuple[Landed, ...] = ()
    written: tuple[Written, ...] = ()
    # It is known what is stored, after `renew` of the new weights: it may be asked from now on.
    has_opened: bool = False


NO_NEWS = TierNews()


class TierReport(NamedTuple):
    """Numbers for people. Nothing is decided by them."""

    state: str  # "open", or why nothing is read and written
    folder: str = ""
    num_blocks: int = 0  # that may be found
    num_bytes: int = 0  # of all files, also those of other models
    max_bytes: int = 0
    read_bytes: int = 0  # since the start
    written_bytes: int = 0
    dropped_blocks: int = 0  # for lack of room
    faults: int = 0  # blocks that could not be read or written, or were damaged
    # In the memory of the host, for pools that lie elsewhere.
    host: str = "this server was started without --cache-host-gb"
    host_blocks: int = 0
    host_bytes: int = 0
    max_host_bytes: int = 0
    host_read_bytes: int = 0
    host_written_bytes: int = 0
    host_dropped_blocks: int = 0


class Mover(Protocol):
    """Moves KV between the pool and somewhere else: what memory knows of a store."""

    def fetch(self, ticket: int, key: CacheKey, start: int, pages: IntArray) -> None: ...

    def keep(self, ticket: int, key: CacheKey, start: int, pages: IntArray) -> None: ...

    def cancel(self, ticket: int) -> None: ...

    def flush(self) -> None:
        """Find nothing any more of what is in memory. Files stay."""
        ...

    def renew(self, why: str) -> None:
        """The weights are others from now on: nothing that was stored before is of use. `why` is
        for people."""
        ...


class Tiers(Mover, Protocol):
    """Called from one thread."""

    def seek(self, id: int, key: CacheKey, have: int, since: int) -> Sought:
        """How much of a sequence is stored, for a request `id` that has K and V of the first `have`
        tokens, and can begin behind the first `since` of them.

        Looks into memory alone. A sequence of which nothing is stored costs one digest.
        """
        ...

    def lacks(self, key: CacheKey) -> Present:
        """What of a sequence, whole blocks, need not be written any more."""
        ...

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        ending: IntArray = NO_PAGES,
    ) -> None:
        """Read the tokens of `key` from `start` on into pages [n], a whole number of blocks, and
        what its ending has into places of their own [m]; none: it is not wanted. All of them belong
        to the ticket until it has landed."""
        ...

    def keep(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        ending: IntArray = NO_PAGES,
    ) -> None:
        """Write the tokens of `key` from `start` on from pages [n], a whole number of blocks, and
        behind them its ending from places [m]; none: it is not written."""
        ...

    def cancel(self, ticket: int) -> None:
        """End a transfer early.

        A `fetch` will still land. A `keep` will not be told of any more; its pages are free from
        now on, for whatever they hold later is not stored.
        """
        ...

    def take(self) -> TierNews: ...

    def clear(self) -> None:
        """Forget all that is stored, of this model and of others."""
        ...

    def renew(self, why: str) -> None:
        """Find nothing of the weights so far, and nothing at all until the store has opened again,
        with what it has of the new ones. What is under way goes on under the old ones."""
        ...

    def stop(self, why: str) -> None:
        """Find and store nothing any more: `why` is for people."""
        ...

    def settle(self) -> None:
        """Wait until no transfer is under way, and forget what they were."""
        ...

    def report(self) -> TierReport: ...


class NoTiers:
    """Stores nothing."""

    def seek(self, id: int, key: CacheKey, have: int, since: int) -> Sought:
        return NOT_STORED

    def lacks(self, key: CacheKey) -> Present:
        return NOTHING_PRESENT

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        ending: IntArray = NO_PAGES,
    ) -> None:
        raise AssertionError("nothing was found")

    def keep(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        ending: IntArray = NO_PAGES,
    ) -> None:
        raise AssertionError("nothing is stored here")

    def cancel(self, ticket: int) -> None:
        raise AssertionError("there is no transfer")

    def take(self) -> TierNews:
        return NO_NEWS

    def clear(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def renew(self, why: str) -> None:
        pass

    def stop(self, why: str) -> None:
        pass

    def settle(self) -> None:
        pass

    def report(self) -> TierReport:
        return TierReport("this server was started without --cache-dir")
