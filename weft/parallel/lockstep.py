"""Steps that several processes run together, some of them without work of their own.

    rank 0   wants  prefill  decode   decode   -        decode
    rank 1   wants  decode   decode   decode   prefill  -
                    ───────────────────────────────────────────
    round           prefill  decode   decode   prefill  decode
    rank 0   runs   its own  its own  its own  idle     its own
    rank 1   runs   idle     its own  its own  its own  idle

Before each step, all processes announce what they want, and all draw the same conclusion, without a
leader. A process without its own step in a round runs an idle one, in which it computes for the
others. Prefills and decodes run in separate rounds, so that a decode of one process does not take
as long as a prefill of another; if both are wanted, they alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import IntEnum

from weft.ops.sharding import RankLost
from weft.parallel.peers import Peers


class StepWish(IntEnum):
    """The kind of step that a process wants to run next."""

    NOTHING = 0
    DECODE = 1
    PREFILL = 2
    TOGETHER = 3  # an operation that all processes run at once, or none does


def agree(wanted: Sequence[StepWish], last: StepWish) -> StepWish:
    """The kind of the next round, the same in all processes; `last` is the last kind. NOTHING if
    some processes want to run an operation TOGETHER, but others do not yet."""
    if all(one is StepWish.TOGETHER for one in wanted):
        return StepWish.TOGETHER
    kinds = {one for one in wanted if one in (StepWish.DECODE, StepWish.PREFILL)}
    if not kinds:
        return StepWish.NOTHING
    if len(kinds) == 1:
        return kinds.pop()
    return StepWish.DECODE if last is StepWish.PREFILL else StepWish.PREFILL


class Lockstep:
    """The side of one process. Used by one thread."""

    def __init__(self, peers: Peers, idle: Callable[[], None]) -> None:
        """`idle` computes a step for the other processes only."""
        self._peers = peers
        self._idle = idle
        self._last = StepWish.NOTHING
        self.num_idle = 0  # idle steps so far

    @property
    def peers(self) -> Peers:
        return self._peers

    def take_turn(self, kind: StepWish) -> None:
        """Return when the next operation is a step of this kind here. Raises RankLost."""
        while self._round(kind) is not kind:
            pass

    def join(self) -> None:
        """Take part in a round that others have begun. Raises RankLost."""
        self._round(StepWish.NOTHING)

    def meet(self, timeout_s: float) -> bool:
        """Wait until all other processes want to meet, too; their steps run in the meantime. False
        if no round began for `timeout_s`; then all waiting processes get the same answer. Raises
        RankLost."""
        until_s = time.monotonic() + timeout_s
        while True:
            agreed = self._round(StepWish.TOGETHER)
            if agreed is StepWish.TOGETHER:
                return True
            if agreed is not StepWish.NOTHING:
                until_s = time.monotonic() + timeout_s
            if not self._peers.wait_for(max(until_s - time.monotonic(), 0.0)):
                return False

    def is_common(self, ok: bool) -> bool:
        """Whether all processes have the same result of an operation that they ran together. Raises
        RankLost."""
        answers = self._peers.call(bytes([ok]))
        return all(bool(one[0]) is ok for one in answers.values())

    def all_say(self, yes: bool) -> bool:
        """Whether all processes say yes to the same question. Raises RankLost."""
        answers = self._peers.call(bytes([yes]))
        return yes and all(bool(one[0]) for one in answers.values())

    def fail(self, exc: Exception) -> None:
        """A step of this process was interrupted, and others may wait for the rest of it: end all
        common work."""
        if not isinstance(exc, RankLost):
            self._peers.leave("a step of this engine broke off")

    def _round(self, want: StepWish) -> StepWish:
        answers = self._peers.call(bytes([want]))
        wanted = [want, *(StepWish(answers[other][0]) for other in self._peers.others)]
        agreed = agree(wanted, self._last)
        if agreed in (StepWish.DECODE, StepWish.PREFILL):
            self._last = agreed
            if want is not agreed:
                self.num_idle += 1
                self._idle()
        return agreed
