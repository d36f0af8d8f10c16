"""Chooses the drafts of the running requests for the next step.

    sources ─▶ tokens that may follow                        sources.py
    trust   ─▶ how many of them to compute: the cost of a token against its chance to be right
    room    ─▶ limits of memory, and of the length of the request

It decides only by known tokens and measured costs of steps, so a replay decides the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.scheduler.feature import Feature, FeatureHooks
from weft.scheduler.history import Counters, DraftCount, RequestDrafts, RequestHistory
from weft.scheduler.pace.pace import Pace
from weft.scheduler.pace.step_cost import MIN_STEP_S, CostModel, StepLoad
from weft.scheduler.request import Columns, Request
from weft.scheduler.speculation.sources import DraftSource, Known
from weft.scheduler.speculation.trust import (
    DOUBT,
    FADE,
    FADE_SOURCE,
    FORGET,
    FORGET_OF_MODEL,
    FORGET_SOURCE,
    FORGET_SOURCE_OF_MODEL,
    WEIGHT,
    WEIGHT_OF_MODEL,
    WEIGHT_SOURCE,
    WEIGHT_SOURCE_OF_MODEL,
    HitRate,
    least_chance,
    num_worthwhile,
)

MIN_LEFT = 4  # shorter remaining outputs get no drafts
# Requests that are considered in one step, besides those whose last drafts were right. So planning
# a step of hundreds takes about as long as planning one without drafts.
MAX_LOOKS = 8
# Considering drafts takes about this long on the host. After a step without drafts come so many
# steps without a look that looks take LOOK_PART of the time, or less.
LOOK_S = 6e-5
LOOK_PART = 0.015
MOST_DOUBLINGS = 2  # of that rest, one for each look in a row without drafts
# If there are only sources whose drafts are made in steps of their own, such a look does nothing
# but note why there are none.
REST_WITHOUT_SOURCES = 256
# Reasons why a request had no draft in its last step.
NEAR_END = "its output is about to end"
NOT_WORTH_IT = "guesses have not been right often enough for what they cost in this batch"
NO_IDEA = "no source has a guess"
RULED_OUT = "what was guessed is not allowed, or leaves no choice (a grammar)"
NOT_PLAIN = "with overlap nothing is guessed where more than tokens is asked for (--no-overlap)"
NO_ROOM = "neither the step nor the KV memory has room for it"


def steps_of_rest(cost: CostModel, load: StepLoad) -> int:
    """How many steps of this load pass after a look without drafts before the next look."""
    step_s = max(cost.seconds(load), MIN_STEP_S)
    return int(LOOK_S / (LOOK_PART * step_s))


class Draft(NamedTuple):
    """The drafts of one row in one step."""

    row: int
    source: int  # index in the list of sources
    tokens: IntArray  # [n], n > 0


@dataclass(slots=True)
class RowTrust:
    """Statistics of the drafts of a request, while it has its row."""

    request: Request
    drafts: RequestDrafts
    hindrance: str  # why a feature allows no drafts; "" if all allow them
    cutting: list[Feature]  # its features that shorten drafts
    is_plain: bool  # it uses no feature, so the host need not know the run before the next step
    rates: list[HitRate]  # by source


@dataclass(slots=True)
class Speculator:
    """`max_drafts`: limit per request and step. `repeats_runs`: a step may begin with the runs of
    the previous one, whose drafts are not compared yet."""

    columns: Columns
    hooks: FeatureHooks
    pace: Pace
    history: RequestHistory
    counters: Counters
    sources: list[DraftSource]
    max_drafts: int
    repeats_runs: bool = False
    _rates: list[HitRate] = field(init=False)  # by source, of all requests
    _rows: dict[int, RowTrust] = field(init=False, default_factory=dict)
    _is_due: BoolArray = field(init=False)  # by row: considered in the next step
    _turn: int = field(init=False, default=0)  # number of other rows considered so far
    _num_resting: int = field(init=False, default=0)  # steps until the next look
    _num_vain: int = field(init=False, default=0)  # looks in a row without drafts
    _asks_sources: bool = field(init=False)  # whether some draft only when they are asked

    def __post_init__(self) -> None:
        self._is_due = np.zeros(len(self.columns.seq_len), dtype=np.bool_)
        for source in self.sources:
            self.counters.drafts[source.option] = DraftCount()
        self._rates = [HitRate() for _ in self.sources]
        self._asks_sources = not all(source.is_decided for source in self.sources)

    def propose(self, rows: IntArray) -> list[Draft]:
        """The drafts of the next step of `rows`."""
        if self._num_resting:
            self._num_resting -= 1
            return []
        columns = self.columns
        lens = columns.seq_len.take(rows)
        is_ready = columns.max_len.take(rows) > lens + MIN_LEFT
        if not self.repeats_runs:
            # Only a row whose last token is known may have drafts.
            is_ready &= columns.known_len.take(rows) == lens
        ready: IntArray = rows[is_ready]
        if not len(ready):
            return []
        if len(ready) > MAX_LOOKS:
            ready = self._in_turn(ready)
        cost = self.pace.model()
        if cost is None:
            return []
        load = StepLoad(len(rows), int(lens.sum()))
        priors = self.priors()
        drafts: list[Draft] = []
        declined: set[int] = set()  # sources that are not worth it for a row
        for row, length in zip(ready.tolist(), columns.seq_len[ready].tolist(), strict=True):
            least = least_chance(cost, load, len(rows), length)
            draft = self._draft(row, length, least, priors, declined)
            self._is_due[row] = draft is not None
            if draft is not None:
                drafts.append(draft)
        # Once a step, or many rows would soon forget together what was wrong.
        for i in declined:
            self._rates[i].fade(FADE_SOURCE)
        if drafts:
            self._num_vain = 0
        elif self._asks_sources:
            self._num_resting = steps_of_rest(cost, load) << self._num_vain
            self._num_vain = min(self._num_vain + 1, MOST_DOUBLINGS)
        else:
            self._num_resting = REST_WITHOUT_SOURCES
        return drafts

    def look_at(self, row: int) -> None:
        """There are drafts for the row: consider it in the next step."""
        self._is_due[row] = True
        self._num_resting = 0
        self._num_vain = 0

    def trust(self, row: int) -> RowTrust:
        """The statistics of the request in a row."""
        request: Request = self.columns.requests[row]
        trust = self._rows.get(row)
        if trust is None or trust.request is not request:
            used = self.hooks.of(request)
            cutting = [one for one in used if type(one).cut_draft is not Feature.cut_draft]
            trace = self.history.trace(request.id)
            assert trace is not None, "an open request has no trace"
            if trace.drafts is None:
                trace.drafts = RequestDrafts()
            trust = RowTrust(
                request,
                trace.drafts,
                hindrance=next((one.no_draft for one in used if one.no_draft), ""),
                cutting=cutting,
                is_plain=not used,
                rates=[HitRate() for _ in self.sources],
            )
            self._rows[row] = trust
        return trust

    def chances(self, trust: RowTrust, priors: list[float]) -> list[float]:
        """By source: the chance that a draft is right if the draft before it is. `priors`: of a
        new request."""
        found = []
        for source, rate, prior in zip(self.sources, trust.rates, priors, strict=True):
            weight = WEIGHT_OF_MODEL if source.is_decided else WEIGHT
            found.append(rate.value(prior, weight))
        return found

    def most(self, row: int, length: int) -> int:
        """The limit of drafts after `length` tokens of a row: the token sampled after the last
        draft must fit, too."""
        return min(self.max_drafts, int(self.columns.max_len[row]) - length - 1)

    def learn(self, draft: Draft, num_right: int) -> None:
        """The first `num_right` of the drafts were right."""
        num_drafts = len(draft.tokens)
        source = self.sources[draft.source]
        self.counters.drafts[source.option].add(num_drafts, num_right)
        forget, forget_source = FORGET, FORGET_SOURCE
        if source.is_decided:
            forget, forget_source = FORGET_OF_MODEL, FORGET_SOURCE_OF_MODEL
        self._rates[draft.source].learn(num_drafts, num_right, forget_source)
        trust = self._rows.get(draft.row)
        if trust is None:
            return
        self._is_due[draft.row] = num_right > 0
        trust.rates[draft.source].learn(num_drafts, num_right, forget)
        trust.drafts.add(source.option, num_drafts, num_right)

    def num_right(self, source: int) -> int:
        """How many drafts of a source were right so far, of all requests."""
        return self.counters.drafts[self.sources[source].option].num_right

    def doubt(self, source: int, row: int) -> None:
        """A source that has been given up makes drafts for a row, to see whether it was right to
        give it up."""
        self._rates[source].fade(DOUBT)
        self.trust(row).rates[source].fade(DOUBT)

    def lose(self, draft: Draft) -> None:
        """The draft was made after others that were wrong, so it says nothing of its source."""
        num_drafts = len(draft.tokens)
        option = self.sources[draft.source].option
        self.counters.drafts[option].add(num_drafts, 0)
        trust = self._rows.get(draft.row)
        if trust is not None:
            trust.drafts.add(option, num_drafts, 0)

    def is_plain(self, row: int) -> bool:
        """Whether the request in a row uses no feature."""
        return self.trust(row).is_plain

    def drop(self, draft: Draft) -> None:
        """The draft is not computed, because there is no room for it."""
        self._rows[draft.row].drafts.why_none = NO_ROOM

    def row_released(self, request: Request) -> None:
        """The request releases its row."""
        if self._rows.pop(request.row, None) is None:
            return  # it was never considered
        for source in self.sources:
            source.forget(request)

    def priors(self) -> list[float]:
        """By source: the fraction of its drafts that is expected to be right for a new request."""
        found = []
        for rate, source in zip(self._rates, self.sources, strict=True):
            weight = WEIGHT_SOURCE_OF_MODEL if source.is_decided else WEIGHT_SOURCE
            found.append(rate.value(source.prior, weight))
        return found

    # Inside

    def _in_turn(self, ready: IntArray) -> IntArray:
        """Of the rows that may have drafts: those that probably have one, and some of the
        others."""
        is_due: BoolArray = self._is_due[ready]
        others = np.flatnonzero(~is_due)
        if len(others) > MAX_LOOKS:
            others = others[(self._turn + np.arange(MAX_LOOKS)) % len(others)]
            self._turn += MAX_LOOKS
        is_due[others] = True
        return ready[is_due]

    def _draft(
        self, row: int, length: int, least: float, priors: list[float], declined: set[int]
    ) -> Draft | None:
        """Adds the sources that are not worth it for this row to `declined`."""
        trust = self.trust(row)
        most = self.most(row, length)
        # Tokens sampled by a step whose result is not known yet.
        num_ahead = length - int(self.columns.known_len[row])
        hindrance = trust.hindrance
        if num_ahead and not trust.is_plain:
            hindrance = hindrance or NOT_PLAIN
        if hindrance or most < 1:
            trust.drafts.why_none = hindrance or NEAR_END
            return None
        if num_ahead:
            least *= 2  # the next step computes the draft again
        known: Known | None = None
        why = NOT_WORTH_IT
        for i, source in enumerate(self.sources):
            rate = trust.rates[i].value(priors[i], WEIGHT)
            num = most if source.is_decided else num_worthwhile(rate, least, most)
            if not num:
                trust.rates[i].fade(FADE)
                declined.add(i)
                continue
            if known is None:
                known = Known(trust.request, self.columns.packed(row, length - num_ahead))
            found = source.drafts(known, num_ahead + num)[num_ahead * TOKEN_BYTES :]
            if not found:
                why = NO_IDEA
                continue
            tokens = self._cut(trust, np.frombuffer(found, dtype=np.int32))
            if len(tokens):
                trust.drafts.why_none = ""
                return Draft(row, i, tokens)
            why = RULED_OUT
        trust.drafts.why_none = why
        return None

    def _cut(self, trust: RowTrust, draft: IntArray) -> IntArray:
        """The part of a draft that the features of its request allow."""
        for feature in trust.cutting:
            if not len(draft):
                break
            draft = draft[: feature.cut_draft(trust.request, self.columns, draft)]
        return draft
