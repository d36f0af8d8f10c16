"""Tiers: KV of cached prefixes that outlives the pool, stored in blocks of tokens.

        seek    ─▶ how much of a sequence is stored, and how long it takes to read
        fetch   ─▶ read it into pages that the caller has reserved      ─▶ Landed
        keep    ─▶ write it from pages that do not change meanwhile     ─▶ Written
        cancel  ─▶ a fetch lands soon with what was read; a keep writes no more
        take    ─▶ the transfers that have ended

No call waits for the store, and none raises: after a fault, fewer tokens land. A block is found by
its key: all tokens up to its end, their namespace, and everything else on which K and V depend.
Implementations: `weft/tiers/disk/` (files in a folder), the journal's replay, `NoTiers`.

If some layers have windows in a pool of their own, or keep a state, a sequence can be resumed only
where a *resume state* is stored with a block: the pages of the window before its end, or the state
after it. Models without such layers have no resume states, and sequences can be resumed after every
block."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from weft.arrays import IntArray
from weft.memory.prefix_cache import NO_PAGES, CacheKey


class Sought(NamedTuple):
    """The stored part of the beginning of a sequence."""

    num_tokens: int  # full blocks, from the first token to where it can be resumed
    read_s: float  # expected time to read the part that the caller lacks


NOT_STORED = Sought(0, 0.0)


class Present(NamedTuple):
    """The part of a sequence that is stored or being written."""

    num_tokens: int  # of its beginning, full blocks
    can_resume: bool = True  # whether a resume state allows to resume it there


NOTHING_PRESENT = Present(0)


class Landed(NamedTuple):
    """A `fetch` has ended: its pages are the caller's again."""

    ticket: int
    num_tokens: int  # tokens that the pages have now, from the first one on; the rest is undefined
    seconds: float  # since the call of `fetch`
    has_resume_state: bool = False  # everything was read, and the resume state that was requested
    num_from_host: int = 0  # of these tokens, those from the memory of the host


class Written(NamedTuple):
    """A `keep` has ended: its pages are not read any more."""

    ticket: int
    num_bytes: int  # written bytes


class TierNews(NamedTuple):
    """What has happened since the last call of `take`."""

    landed: tuple[Landed, ...] = ()
    written: tuple[Written, ...] = ()
    # Whether the store has opened for the new weights after `renew`, and may be used from now on.
    has_opened: bool = False


NO_NEWS = TierNews()


class TierReport(NamedTuple):
    """Numbers for users. No decision uses them."""

    state: str  # "open", or why nothing is read and written
    folder: str = ""
    num_blocks: int = 0  # blocks that can be found
    num_bytes: int = 0  # of all files, including those of other models
    max_bytes: int = 0
    read_bytes: int = 0  # since the start
    written_bytes: int = 0
    dropped_blocks: int = 0  # for lack of space
    faults: int = 0  # blocks that could not be read or written, or were damaged
    # In the memory of the host, for pools on another device.
    host: str = "this server was started without --cache-host-gb"
    host_blocks: int = 0
    host_bytes: int = 0
    max_host_bytes: int = 0
    host_read_bytes: int = 0
    host_written_bytes: int = 0
    host_dropped_blocks: int = 0


class Mover(Protocol):
    """Moves KV between the pool and another place: the part of a store that memory knows."""

    def fetch(self, ticket: int, key: CacheKey, start: int, pages: IntArray) -> None: ...

    def keep(self, ticket: int, key: CacheKey, start: int, pages: IntArray) -> None: ...

    def cancel(self, ticket: int) -> None: ...

    def flush(self) -> None:
        """Find nothing any more that is in memory. Files stay."""
        ...

    def renew(self, why: str) -> None:
        """The weights change now: KV that was stored before is of no use. `why` is text for
        users."""
        ...


class Tiers(Mover, Protocol):
    """All methods are called from one thread."""

    def seek(self, id: int, key: CacheKey, have: int, since: int) -> Sought:
        """How much of a sequence is stored, for a request `id` that has K and V of the first `have`
        tokens, and can resume after the first `since` of them.

        Reads memory only. If nothing of a sequence is stored, the cost is one digest.
        """
        ...

    def lacks(self, key: CacheKey) -> Present:
        """The part of a sequence, in full blocks, that need not be written."""
        ...

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        """Read the tokens of `key` from `start` on into pages [n], a whole number of blocks, and
        its resume state into places [m] of their own (empty: no resume state). All of them belong
        to the ticket until it has landed."""
        ...

    def keep(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        """Write the tokens of `key` from `start` on from pages [n], a whole number of blocks, and
        after them its resume state from places [m] (empty: no resume state)."""
        ...

    def cancel(self, ticket: int) -> None:
        """End a transfer early.

        A `fetch` will still land. A `keep` is not reported any more; its pages are free from now
        on, because their later content is not stored.
        """
        ...

    def take(self) -> TierNews: ...

    def clear(self) -> None:
        """Delete everything that is stored, of this model and of others."""
        ...

    def renew(self, why: str) -> None:
        """Find nothing of the old weights, and nothing at all until the store has opened again for
        the new weights. Transfers in progress continue with the old ones."""
        ...

    def stop(self, why: str) -> None:
        """Find and store nothing any more. `why` is text for users."""
        ...

    def close(self) -> None:
        """End the threads when they have done all their work. No method is called after this."""
        ...

    def settle(self) -> None:
        """Wait until no transfer is in progress, and forget the transfers."""
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
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        raise AssertionError("nothing was found")

    def keep(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
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

    def close(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def report(self) -> TierReport:
        return TierReport("this server was started without --cache-dir")
