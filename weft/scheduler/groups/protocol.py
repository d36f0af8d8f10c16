"""The seam of `KvMemory` for layers with memory of their own.

Layers with sliding windows keep K and V of the last tokens alone; some layers keep a state instead.
Layers that keep the same form a *group*. `KvMemory` has the pool of all other layers and the prefix
tree; it tells each group what happens to requests, rows and memory, in the order of `groups`. A
group overrides the hooks that it needs, and knows no other group, queue or policy.

    KvMemory    rows, pages, the tree   ──▶ every hook ──▶ group, group, ...
    PrefillAdder   tokens of the pool   ──▶ fits, take ──▶ a GroupBudget of each group
    KvAccounts     owners, sums, faults ──▶ audit, ... ──▶ the GroupLedger of each group
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from weft.arrays import IntArray
from weft.memory.accounting.audit import Fault
from weft.memory.accounting.holders import ResumeStateInUse
from weft.memory.accounting.pins import Pins
from weft.memory.prefix_cache import Handle, Inserted
from weft.memory.radix.cache import RadixCache
from weft.memory.tiers.resume_states import ResumeStates
from weft.plan.step import Plan
from weft.scheduler.request import Columns, Request
from weft.scheduler.settings import SchedulerSettings


class Lack(Enum):
    MEMORY = "memory"  # of the KV pool
    COMPLETIONS = "completions"  # memory of the KV pool, before some running request ends
    GROUP = "group"  # memory of a group of layers
    TOKENS = "tokens"  # tokens of this step
    TIME = "time"  # time of this step: running requests wait for their next token
    OPEN_PROMPT = "open prompt"  # another prompt is open, and at most one may be
    ENCODER = "encoder"  # work of the encoder of pictures, videos and sounds in this step


class MemoryName(NamedTuple):
    """What users read about a kind of memory."""

    what: str  # as in "no {what}"
    is_tokens: bool = True  # whether its numbers are tokens; else requests need one piece each
    option: str = ""  # the option that gives more of it


KV_MEMORY = MemoryName("KV memory")


class Shortage(NamedTuple):
    """Why a request was refused. The numbers are of that moment: `needed` is above `available`.

    They count tokens of memory or of the step; if time was short, the tokens for which there was
    time.
    """

    lack: Lack
    needed: int
    available: int
    free: int = 0  # tokens of memory that are free or evictable, including those promised to others
    memory: MemoryName = KV_MEMORY  # which memory was short
    evictable: int = 0  # of the free tokens, those that the prefix cache would have to give up


class GroupParts(NamedTuple):
    """What a group shares with `KvMemory`, and the settings that say how large it is."""

    settings: SchedulerSettings
    cache: RadixCache
    columns: Columns
    pins: Pins


class PassFacts(NamedTuple):
    """What a group's budget must know of a pass."""

    running_rows: IntArray
    ratio: float  # fraction of their output that running requests are expected to generate
    mixed_kv: int  # tokens of memory that decoding requests take that join the step


class GroupBudget:
    """The memory of one group in one pass over the queue. By default, it is never short.

    `extend`: the tokens of a prompt that the step computes; `reserve`: those that the request is
    expected to generate.
    """

    @property
    def tokens_left(self) -> float:
        """Tokens for which there is memory, minus the tokens that are expected to be generated."""
        return math.inf

    def fits(self, request: Request, extend: int, reserve: int, *, is_alone: bool) -> bool:
        """Whether the request has room. `is_alone`: no other request runs, and none is picked."""
        return True

    def take(self, request: Request, extend: int, reserve: int) -> None:
        """The step computes this piece of the request."""

    def shortage(self, request: Request, extend: int, reserve: int) -> Shortage | None:
        """What a refused request lacks in this group; None: it lacks nothing here."""
        return None

    def no_page(self, cur_rem_tokens: int) -> Shortage | None:
        """Why an open prompt cannot continue; `cur_rem_tokens`: tokens left in all memory
        together. None: the reason is not in this group."""
        return None

    def lacking(self, request: Request, extend: int, reserve: int) -> float:
        """Tokens that the request lacks to be admitted while others run; below 0: none."""
        return -math.inf


class GroupLedger:
    """Who owns each piece of a group's memory. By default, there is none to own."""

    pool = ""  # the name of the memory in reports of faults, with a blank after it

    def usage(self) -> dict[str, int]:
        """The fields of `Stats` about this memory."""
        return {}

    @property
    def imbalance(self) -> int:
        """Pages or slots that are counted twice, or, if negative, not at all."""
        return 0

    def audit(self, requests: Mapping[str, Request], in_use: Sequence[ResumeStateInUse]) -> None:
        """Check the owner of everything. `requests` are those with a row, by name; `in_use`: resume
        states that others hold. Raises AccountingError."""

    def find_faults(
        self, requests: Mapping[str, Request], in_use: Sequence[ResumeStateInUse]
    ) -> list[Fault]:
        """The pages or slots that do not have exactly one owner, with `pool` as their pool. Raises
        AccountingError for one outside of the memory."""
        return []

    def quarantine(self, faults: Sequence[Fault], in_use: Sequence[ResumeStateInUse]) -> None:
        """Take the faulty pages or slots of this memory out of use."""

    def last_owner(self, fault: Fault) -> int:
        """The id of the request that owned the page or slot last, or NOBODY."""
        raise NotImplementedError


class KvGroup:
    """A group of layers. The defaults are those of a group that needs no memory."""

    ledger = GroupLedger()
    # A firm pin makes its memory unavailable. Where more than K and V of a prefix must be kept,
    # pins are removed when memory is needed, as those of sessions are.
    pins_firmly = True
    # Whether a cached prefix can be resumed after each of its pages.
    resumes_everywhere = True

    # Capacity

    def longest(self, capacity: int) -> int:
        """Tokens of the longest request that can run; `capacity`: those that the pool allows."""
        return capacity

    @property
    def available(self) -> int | None:
        """Tokens that could be allocated now; None: the group does not limit tokens."""
        return None

    def new_budget(self, facts: PassFacts) -> GroupBudget:
        """The budget of a pass."""
        return GroupBudget()

    # A waiting request

    def resumable(self, handle: Handle, length: int) -> tuple[Handle, int]:
        """The longest part of a cached prefix of `length` tokens, up to `handle`, that this group
        can resume: its end, and its number of tokens. Counts as a use."""
        return handle, length

    def lock(self, request: Request, found_len: int) -> None:
        """Protect what the matched prefix of a request has in this group. `found_len`: tokens that
        are cached of it, of which some may not be resumable."""

    def unlock(self, request: Request, handle: Handle) -> None:
        """Undo `lock`, if it was called for this request and the request has no row yet."""

    def next_copy(self, request: Request) -> int:
        """The length in tokens at which a picked request will leave the next point where others can
        resume; 0: none. Called only if `resumes_everywhere` is false."""
        return 0

    # A request with a row

    def take_row(self, request: Request) -> None:
        """A locked request has a row now, which begins with its cached prefix."""

    def extend(self, request: Request) -> None:
        """The next step computes the tokens from `kv_len` to `extend_end` of a prompt."""

    def slots_again(self, request: Request, start: int) -> None:
        """The next step computes more layers of the tokens from `start` on."""

    def withdraw(self, request: Request, start: int) -> None:
        """The tokens from `start` on will not be computed."""

    def before_decode(self, rows: IntArray) -> None:
        """`rows` are going to compute their next tokens, if there is memory."""

    def extend_running(self, rows: IntArray, positions: IntArray) -> None:
        """The next step computes T tokens of decoding rows: [T] rows, [T] positions in them."""

    def room_for_drafts(self, num_tokens: int) -> int:
        """How many of the drafts of the next step this group can take back, at most `num_tokens`,
        which are wanted; it may evict what only the cache has."""
        return num_tokens

    def cut(self, row: int, kv_len: int, before: int) -> None:
        """Only the first `kv_len` of a row's `before` tokens are valid."""

    def inserted(self, request: Request, inserted: Inserted, since: int) -> None:
        """The computed tokens of a row are in the cache; the first `since` were there before."""

    def shared(self, request: Request) -> None:
        """The row uses the cached pages now (`KvMemory.share`)."""

    def released(
        self, request: Request, row: int, num_computed: int, inserted: Inserted | None
    ) -> None:
        """A request has given up its row of `num_computed` tokens. `inserted`: what the cache keeps
        of them, if it keeps them."""

    def reset(self) -> None:
        """Free everything. Reads no state that a fault may have damaged. Called before the cache is
        dropped."""

    def with_slots(self, plan: Plan) -> Plan:
        """The plan with the slots of this group. Called once for each plan, after all its memory
        has been allocated."""
        return plan

    # When memory runs out

    def lacking(self, rows: IntArray, num_tokens: int, num_ahead: int) -> int:
        """Tokens that are missing for the next decode step of `rows`, which takes `num_tokens`, and
        for `num_ahead` tokens of each row."""
        return 0

    @property
    def num_pages(self) -> int:
        """Size of the memory in pages. Only for groups that limit tokens."""
        return 0

    def freed_tokens(self, request: Request) -> int:
        """Tokens that become available if this request is retracted. Only for groups that limit
        tokens."""
        return 0

    def resume_states(self, block_len: int) -> ResumeStates | None:
        """What a sequence needs besides K and V to be resumed, if its KV leaves the pool; None:
        nothing. `block_len`: tokens of the blocks after which a store has it."""
        return None
