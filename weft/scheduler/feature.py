"""Five moments in the life of a request, for everything optional.

A feature that some requests use and most do not is a Part: it keeps its own state per request, overrides the moments
that it needs, and stands in the one ordered list of parts (`service/engine.py`). The core asks the parts at these
moments and knows nothing else of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from weft.messages.replies import Extra, FinishReason, TokenLogprobs
from weft.plan.step import (
    Fixed,
    HiddenStates,
    InputVectors,
    LogitBias,
    Logprobs,
    Mask,
    Penalties,
    Pooling,
    Processing,
    PromptLogprobs,
    Result,
    Wanted,
)
from weft.scheduler.batch import Batch
from weft.scheduler.commit import End, Forced
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Columns, Request


class Verdict(Enum):
    READY = "ready"
    WAIT = "wait"  # not in this pass; others may go before


@dataclass(slots=True)
class Extras:
    """What parts add to one step. Indices of sampling count the sampling requests, 0..S-1; others all, 0..R-1."""

    biases: list[LogitBias] = field(default_factory=list)
    penalties: Penalties | None = None
    processors: tuple[Processing, ...] = ()
    allowed: Mask | None = None
    mask: Mask | None = None
    fixed: Fixed | None = None
    blocks_overlap: bool = False  # the next step depends on what this one samples: it is not planned before that is known
    logprobs: Logprobs | None = None
    pooling: Pooling | None = None
    prompt_logprobs: PromptLogprobs | None = None
    hidden_states: HiddenStates | None = None
    vectors: InputVectors | None = None

    @property
    def wanted(self) -> Wanted | None:
        kinds = self.pooling, self.prompt_logprobs, self.hidden_states
        return None if all(kind is None for kind in kinds) else Wanted(*kinds)


@dataclass(slots=True)
class StepReplies:
    """What parts add to the replies of one step, and the requests that they end with its tokens."""

    logprobs: list[TokenLogprobs] = field(default_factory=list)
    given: list[Extra] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    forced: list[Forced] = field(default_factory=list)


class Part:
    """Override what is needed. No moment may wait for anything."""

    def admit(self, request: Request) -> Verdict:
        """The request could be admitted in this pass: may it?"""
        return Verdict.READY

    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        """The batch is about to be launched: add what its sampling needs."""

    def commit(self, batch: Batch, columns: Columns, result: Result, replies: StepReplies) -> None:
        """The result of a batch has come. Requests that left since are in `batch`, but not `batch.is_live`."""

    def release(self, request: Request) -> None:
        """The request gives up its row: finished, aborted or retracted. Forget what belongs to the row."""

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        """A request that was queued has ended. It holds nothing any more; `packed` has its prompt and output, and the
        cache what it has computed of them."""


class Moments:
    """The parts' methods by moment, without those that a part left as they are: what nobody uses costs nothing."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.admit = [part.admit for part in parts if type(part).admit is not Part.admit]
        self.prepare = [part.prepare for part in parts if type(part).prepare is not Part.prepare]
        self.commit = [part.commit for part in parts if type(part).commit is not Part.commit]
        self.release = [part.release for part in parts if type(part).release is not Part.release]
        self.end = [part.end for part in parts if type(part).end is not Part.end]
