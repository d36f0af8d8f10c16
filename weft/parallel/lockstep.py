"""Steps that several processes take together, each with work of its own or with none.

    rank 0   wants  prefill  decode   decode   -        decode
    rank 1   wants  decode   decode   decode   prefill  -
                    ───────────────────────────────────────────
    round           prefill  decode   decode   prefill  decode
    rank 0   runs   its own  its own  its own  idle     its own
    rank 1   runs   idle     its own  its own  its own  idle

Before each step all tell what they want, and all draw the same conclusion: nobody decides for the
others, and nothing is left out. Who does not run a step of its own runs an idle one, in which it
computes for the others. Prefills and decodes keep apart, so that a decode of one does not take as
long as a prefill of another; kinds that are both wanted take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import IntEnum

from weft.ops.sharding import RankLost
from weft.parallel.peers import Peers


class StepWish(IntEnum):
    """What a process would do next."""

    NOTHING = 0
    DECODE = 1
    PREFILL = 2
    TOGETHER = 3  # something that all do at once, or nobody


def agree(wanted: Sequence[StepWish], last: StepWish) -> StepWish:
    """What is done, as all find it: `last` is the step that was taken last. NOTHING if those that
    want something all want to do it together, and some do not want it yet."""
    if all(one is StepWish.TOGETHER for one in wanted):
        return StepWish.TOGETHER
    kinds = {one for one in wanted if one in (StepWish.DECODE, StepWish.PREFILL)}
    if not kinds:
        return StepWish.NOTHING
    if len(kinds) == 1:
        return kinds.pop()
    return StepWish.DECODE if last is StepWish.PREFILL else StepWish.PREFILL


class Lockstep:
    """One process's side. Used by one thread."""

    def __init__(self, peers: Peers, idle: Callable[[], None]) -> None:
        """`idle` computes a step for the others alone."""
        self._peers = peers
        self._idle = idle
        self._last = StepWish.NOTHING
        self.num_idle = 0  # idle steps so far

    @property
    def peers(self) -> Peers:
        return self._peers

    def take_turn(self, kind: StepWish) -> None:
        """Return when a step of this kind is to run here, as the next thing that is done. Raises
        RankLost."""
        while self._round(kind) is not kind:
            pass

    def join(self) -> None:
        """Take part in what others have begun. Raises RankLost."""
        self._round(StepWish.NOTHING)

    def meet(self, timeout_s: float) -> bool:
        """Wait until all others want to meet, too; their steps run meanwhile. False if nothing was
        heard of them for so long: then all who wait find the same. Raises RankLost."""
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
        """Whether all have the same to say, behind something that was done together. Raises
        RankLost."""
        told = self._peers.call(bytes([ok]))
        return all(bool(one[0]) is ok for one in told.values())

    def fail(self, exc: Exception) -> None:
        """A step of this process broke off, and others may wait for the rest of it: nothing more
        is done together."""
        if not isinstance(exc, RankLost):
            self._peers.leave("a step of this engine broke off")

    def _round(self, want: StepWish) -> StepWish:
        told = self._peers.call(bytes([want]))
        wanted = [want, *(StepWish(told[other][0]) for other in self._peers.others)]
        agreed = agree(wanted, self._last)
        if agreed in (StepWish.DECODE, StepWish.PREFILL):
            self._last = agreed
            if want is not agreed:
                self.num_idle += 1
                self._idle()
        return agreed
