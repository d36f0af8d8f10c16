"""Features: the moments in the life of a request at which an optional feature acts, and the list of
the features in use.

A part of the scheduler that only some requests use is a `Feature`: it names the parameters that
turn it on, keeps its own state for each request, and overrides the moments that it needs. The core
calls it at these moments and knows nothing else of it. `FeatureHooks` lists the features of the
open requests, so a step of plain requests calls none:

    arrival ─ admit? ─ why_not_batched? ─ enter_row ─ prepare ─ commit ─ ... ─ release ─ ... ─ end
                                          └─────── while it has a row ──────────────┘
                                                      (again after a retraction)

A feature adds operations of `plan/` to a plan; `features/registry.py` lists all features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import ClassVar, NamedTuple, TypeAlias

import msgspec

from weft.arrays import IntArray
from weft.messages.replies import AuxPiece, FinishReason, TokenLogprobs
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.plan.inputs import EncodeAhead, InputOp
from weft.plan.logits import LogitOp, in_order
from weft.plan.outputs import AuxRequest
from weft.plan.step import Result
from weft.scheduler.admission import PieceBudget
from weft.scheduler.batch import Batch, End, Forced
from weft.scheduler.kv import KvMemory
from weft.scheduler.limits import Refusal
from weft.scheduler.pace.pace import StepBudget
from weft.scheduler.request import Columns, Request


class Admission(Enum):
    READY = "ready"
    WAIT = "wait"  # not in this pass; others may go before it


class QueueWalk(NamedTuple):
    """A walk over the queue, for features that decide which requests may run together."""

    number: int  # increases from walk to walk
    now: float
    picked: Sequence[Request]  # picked in this walk so far: they have no row yet
    kv: KvMemory  # memory of the requests that have a row
    is_overdue: Callable[[Request, float], bool]  # at `now`


class StepInputs:
    """Additions of features to the plan of one step, in any order; `FeatureHooks` sorts them."""

    __slots__ = (
        "adapters",
        "ahead",
        "blocks_overlap",
        "inputs",
        "logits",
        "outputs",
        "rotation",
        "sees_to",
    )

    def __init__(self) -> None:
        self.inputs: list[InputOp] = []
        self.logits: list[LogitOp] = []
        self.outputs: list[AuxRequest] = []
        # The next step depends on the tokens of this one, so it is planned when they are known.
        self.blocks_overlap = False
        # Values of `Plan.adapters`, `Plan.rotation`, `Plan.sees_to` and `Plan.ahead`; each is
        # written by one feature only.
        self.adapters: IntArray | None = None
        self.rotation: IntArray | None = None
        self.sees_to: IntArray | None = None
        self.ahead: EncodeAhead | None = None


class Note(NamedTuple):
    """An action of a feature for a request, in words, for the request's history."""

    id: int
    detail: str


class StepEffects:
    """Additions of features to the replies of one step, the requests that they end with it, and
    their notes."""

    __slots__ = ("aux", "ends", "forced", "logprobs", "notes")

    def __init__(self) -> None:
        self.logprobs: list[TokenLogprobs] = []
        self.aux: list[AuxPiece] = []
        self.ends: list[End] = []
        self.forced: list[Forced] = []
        self.notes: list[Note] = []  # about the work of the encoder


# For a step in which no feature takes part. They are shared and stay empty.
NO_INPUTS = StepInputs()
NO_EFFECTS = StepEffects()


class Feature:
    """Override the moments that the feature needs. No method may wait.

    A request uses the feature if one of the fields named here does not have its default. A feature
    that names no field is used by every request.
    """

    sampling_fields: ClassVar[tuple[str, ...]] = ()  # of SamplingParams
    request_fields: ClassVar[tuple[str, ...]] = ()  # of GenerateRequest
    # Why requests that use the feature have no drafts (`speculation/`). With drafts, a step samples
    # several tokens of a row; each counts only if `Batch.is_live` is true for it.
    no_draft: ClassVar[str] = ""
    # Whether `prepare` adds inputs of the first layer for a prompt's tokens, and nothing else.
    gives_inputs: ClassVar[bool] = False
    # Whether `prepare` adds values that all layers use, so that each piece of a split prefill needs
    # it.
    changes_layers: ClassVar[bool] = False

    def refusal(self, message: GenerateRequest) -> Refusal | None:
        """Why a request that would use the feature cannot run; None if it can."""
        return None

    def arrive(self, message: GenerateRequest) -> None:
        """The request has been queued."""

    def admit(self, request: Request) -> Admission:
        """Whether the request, which could be admitted in this pass, may be admitted."""
        return Admission.READY

    def why_waits(self, request: Request) -> str:
        """What a request that may not be admitted waits for, in words for its user. Every feature
        that overrides `admit` overrides it."""
        return "not ready yet"

    def why_not_batched(self, request: Request, walk: QueueWalk) -> str:
        """Whether the request, which may or may not use the feature, may run beside the requests
        that have a row or are picked. Called while some request uses the feature. Returns why not;
        empty if it may."""
        return ""

    def enter_row(self, request: Request) -> None:
        """The request has got its row; its steps follow."""

    def piece_budget(self, budget: StepBudget | None) -> PieceBudget | None:
        """The feature's limits on the pieces of prompts in a pass that begins; None: no limit.
        Called while some request uses the feature. `budget`: the share of the step that prompts may
        take; None: no bound."""
        return None

    def cut_draft(self, request: Request, columns: Columns, draft: IntArray) -> int:
        """The number of the drafts [n] after the request's known tokens that its next step may
        compute. The step may still compute fewer."""
        return len(draft)

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        """The batch is about to be launched: add operations to its plan."""

    def commit(self, batch: Batch, columns: Columns, result: Result, effects: StepEffects) -> None:
        """The result of a batch is known.

        `batch` still has requests that have left since; `batch.is_live` is false for them.
        """

    def release(self, request: Request) -> None:
        """The request releases its row: it is finished, aborted or retracted. Forget the row's
        state."""

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        """A queued request has ended, and owns nothing any more.

        `request.packed` has its prompt and output; the cache has its computed tokens.
        """

    def forget_device(self) -> None:
        """Discard all state that earlier steps have left on the device."""


BatchLimit: TypeAlias = Callable[[Request, QueueWalk], str]
MakePieceBudget: TypeAlias = Callable[[StepBudget | None], PieceBudget | None]
Prepare: TypeAlias = Callable[[Batch, Columns, StepInputs], None]
Commit: TypeAlias = Callable[[Batch, Columns, Result, StepEffects], None]


class Triggers:
    """The fields of one type of message that turn features on when they do not have their default.

    Most messages have the defaults in all of these fields. One comparison finds that out, so the
    fields need not be read one by one.
    """

    def __init__(self) -> None:
        self._triggers: list[tuple[str, object, Feature]] = []
        self._names: tuple[str, ...] = ()
        self._defaults: tuple[object, ...] = ()

    def add(self, kind: type[msgspec.Struct], names: Iterable[str], feature: Feature) -> None:
        """Turn the feature on if one of these fields of `kind` does not have its default."""
        defaults = _defaults(kind)
        for name in names:
            self._triggers.append((name, defaults[name], feature))
        self._names = tuple(name for name, _, _ in self._triggers)
        self._defaults = tuple(default for _, default, _ in self._triggers)

    def turned_on(self, message: msgspec.Struct) -> list[Feature]:
        """The features that the message turns on, once for each field that does so."""
        if not self._names or _reader(self._names)(message) == self._defaults:
            return []
        found = []
        for name, default, feature in self._triggers:
            value = getattr(message, name)
            if value != default:
                found.append(feature)
        return found


@cache
def _defaults(kind: type[msgspec.Struct]) -> dict[str, object]:
    """The defaults of all fields of `kind`. Cached: listing them takes milliseconds per feature."""
    defaults = {}
    for field in msgspec.structs.fields(kind):
        defaults[field.name] = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            defaults[field.name] = field.default_factory()
    return defaults


@cache
def _reader(names: tuple[str, ...]) -> Callable[[object], tuple[object, ...]]:
    """A function that reads these attributes at once. It is cached in this module, because the
    engine's state, which journals record, must consist of plain values.
    """
    if len(names) == 1:
        return lambda message: (getattr(message, names[0]),)
    return attrgetter(*names)


class FeatureHooks:
    """All features, and the hooks of those that an open request uses.

    `prepare` and `commit` are called once per step for every feature in use, in the order of the
    features. The other methods concern one request, and are called only for the features that it
    uses (`of`).
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        self._features: list[Feature] = []
        self._num_users: dict[Feature, int] = {}
        self._by_id: dict[int, tuple[Feature, ...]] = {}  # of the open requests that use some
        self._by_sampling = Triggers()
        self._by_request = Triggers()
        self._of_all: list[Feature] = []  # used by every request
        self.batch_limits: list[BatchLimit] = []  # called for every request that could be admitted
        self.piece_budgets: list[MakePieceBudget] = []  # called for each pass
        self._prepare: list[Prepare] = []
        self._commit: list[Commit] = []
        for feature in features:
            self.add(feature)

    def add(self, feature: Feature) -> None:
        """Offer a feature to the requests that arrive from now on."""
        self._features.append(feature)
        self._num_users[feature] = 0
        self._by_sampling.add(SamplingParams, feature.sampling_fields, feature)
        self._by_request.add(GenerateRequest, feature.request_fields, feature)
        if not (feature.sampling_fields or feature.request_fields):
            self._of_all.append(feature)

    def used_by(self, message: GenerateRequest) -> tuple[Feature, ...]:
        """The features that a request uses, in the order of the features."""
        used = [
            *self._of_all,
            *self._by_sampling.turned_on(message.sampling),
            *self._by_request.turned_on(message),
        ]
        if not used:
            return ()
        return tuple(feature for feature in self._features if feature in used)

    @property
    def num_requests(self) -> int:
        """Open requests that use a feature."""
        return len(self._by_id)

    def of(self, request: Request) -> tuple[Feature, ...]:
        """The features that an open request uses."""
        return self._by_id.get(request.id, ())

    def may_run(self, request: Request) -> bool:
        """Whether all features of a waiting request let it be admitted now."""
        used = self._by_id.get(request.id)
        if used is None:
            return True
        return all(feature.admit(request) is Admission.READY for feature in used)

    def why_waits(self, request: Request) -> str:
        """What a request that may not be admitted now waits for."""
        for feature in self._by_id[request.id]:
            if feature.admit(request) is not Admission.READY:
                return feature.why_waits(request)
        raise AssertionError("it may be admitted")

    def why_not_batched(self, request: Request, walk: QueueWalk) -> str:
        """Why a waiting request cannot run beside the others; empty if it can."""
        for limit in self.batch_limits:
            why = limit(request, walk)
            if why:
                return why
        return ""

    def prepare(self, batch: Batch, columns: Columns) -> StepInputs:
        """The additions of the features in use to the plan of a batch."""
        if not self._prepare:
            return NO_INPUTS
        step = StepInputs()
        for prepare in self._prepare:
            prepare(batch, columns, step)
        step.logits = in_order(step.logits)
        return step

    def prepare_piece(self, batch: Batch, columns: Columns, *, is_first: bool) -> StepInputs:
        """Their additions to a piece of a split prefill before its last piece."""
        step = StepInputs()
        for feature, num_users in self._num_users.items():
            if not num_users:
                continue
            if feature.changes_layers or (is_first and feature.gives_inputs):
                feature.prepare(batch, columns, step)
        return step

    def commit(self, batch: Batch, columns: Columns, result: Result) -> StepEffects:
        """The effects of the features in use after a result."""
        if not self._commit:
            return NO_EFFECTS
        effects = StepEffects()
        for commit in self._commit:
            commit(batch, columns, result, effects)
        return effects

    def new_piece_budgets(self, budget: StepBudget | None) -> list[PieceBudget]:
        """The budgets of the features in use for a pass that begins."""
        found = [make(budget) for make in self.piece_budgets]
        return [one for one in found if one is not None]

    def forget_device(self) -> None:
        """Let all features discard the state that earlier steps have left on the device."""
        for feature in self._features:
            feature.forget_device()

    def subscribe(self, id: int, used: tuple[Feature, ...]) -> None:
        """Let the features of a request that is now open take part in the steps."""
        self._by_id[id] = used
        for feature in used:
            self._num_users[feature] += 1
            if self._num_users[feature] == 1:
                self._list_hooks()

    def unsubscribe(self, request: Request) -> tuple[Feature, ...]:
        """Forget a request that has ended. Returns its features.

        Features without an open request no longer take part in the steps.
        """
        used = self._by_id.pop(request.id, ())
        for feature in used:
            self._num_users[feature] -= 1
            if not self._num_users[feature]:
                self._list_hooks()
        return used

    def _list_hooks(self) -> None:
        self.batch_limits = []
        self.piece_budgets = []
        self._prepare = []
        self._commit = []
        for feature in self._features:
            if not self._num_users[feature]:
                continue
            # A method that a feature does not override is not called.
            kind = type(feature)
            if kind.why_not_batched is not Feature.why_not_batched:
                self.batch_limits.append(feature.why_not_batched)
            if kind.piece_budget is not Feature.piece_budget:
                self.piece_budgets.append(feature.piece_budget)
            if kind.prepare is not Feature.prepare:
                self._prepare.append(feature.prepare)
            if kind.commit is not Feature.commit:
                self._commit.append(feature.commit)
