"""Chooses the rows for which a draft model guesses, and the number of guesses: where they save more
time than they take.

The draft model has K and V of its own, in slots with the same numbers. It lags whenever a
step runs without it. So a flag per slot says whether the draft model has computed the token in the
slot, and the missing tokens are computed before it guesses. Whatever it has computed, a wrong guess
changes no answer.

    slots of a row   | seen | seen | not seen | last |     one step of the draft model computes
                                   |____________________   the rest, and guesses after it

A row's last token and its drafts have no slots yet: they use slots after the KV pool that the draft
model has for each row, and are computed again after the model has kept them.

A head reads hidden states that the model's own steps have left in the slots of tokens, each with
the id of the token after it. So its sequence ends one token before that of the row:

    tokens of a row      | t0 | t1 | t2 | t3 |     the model has computed t0 to t2
    what a head computes | t0 | t1 | t2 |          the states of t0 to t2 with the ids t1 to t3

Tokens whose KV came from outside of the pool have no states: after them a head does not guess.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray
from weft.memory.allocator import slots_of
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.scheduler.kv import KvMemory
from weft.scheduler.pace.step_cost import CostModel, StepLoad
from weft.scheduler.request import Request
from weft.scheduler.settings import DraftSettings, SchedulerSettings
from weft.scheduler.speculation.sources import Known, ModelDrafts
from weft.scheduler.speculation.speculator import MIN_LEFT, Speculator, steps_of_rest
from weft.scheduler.speculation.trust import FADE, FORGET_OF_MODEL

# While the cost of drafts is unknown: 1 to so many for a row, in turn, and for so many rows at
# most; for one row among more.
MOST_FIRST = 4
LEAST_GAIN = 1.03  # factor by which the expected tokens per second must grow
# Where drafts do not pay, one row gets some after this many steps, because costs and texts change.
# Such a trial computes all tokens of the row that the draft model has not seen, so it becomes rarer
# after each trial.
TRY_AGAIN_STEPS = 64
RAREST_TRIAL_STEPS = 4096
# Where drafts do not pay, this is checked again after this many steps, or more if steps are short,
# because the check costs time, too.
LOOK_AGAIN_STEPS = 16
MOST_UNMARKED = 64  # steps
LONGEST_PIECE = 512  # tokens that one step may catch up, if prompts are never cut
# The time to catch up is spread over this many guesses at most, and as many as may still come.
SPREAD_GUESSES = 32


class Guess(NamedTuple):
    """The work of the draft model for a row."""

    row: int
    start: int  # the first token that it has not seen
    length: int  # tokens to compute from there on
    num_drafts: int  # tokens to guess after them; 0: some known tokens will still be missing
    ahead: int = 0  # 1: the id of each is that of the token after it, as a head reads them

    @property
    def ids(self) -> slice:
        """Where the ids of the computed tokens stand in the row."""
        return slice(self.start + self.ahead, self.num_known)

    @property
    def num_known(self) -> int:
        """Tokens of the row before those that are guessed."""
        return self.start + self.length + self.ahead


@dataclass(frozen=True, slots=True)
class DraftShare:
    """The share of a row in the time of the next steps, in seconds."""

    step_s: float  # of a step without drafts
    draft_s: float  # to guess and to compute one more draft
    guess_s: float = 0.0  # to guess at all
    missing_s: float = 0.0  # of a token that the draft model has not seen

    def after(self, num_missing: int, num_guesses: int) -> DraftShare:
        """The share if so many tokens must be caught up for so many guesses."""
        more_s = num_missing * self.missing_s / max(num_guesses, 1)
        return replace(self, guess_s=self.guess_s + more_s)

    def speed(self, chance: float, count: int) -> float:
        """Expected tokens per second with `count` drafts, at least one."""
        num_tokens = 1.0
        is_right = 1.0
        for _ in range(count):
            is_right *= chance
            num_tokens += is_right
        return num_tokens / (self.step_s + self.guess_s + count * self.draft_s)

    def best_count(self, chance: float, most: int) -> int:
        """The number of drafts with the most tokens per second, if each is right with this chance
        where the one before is; 0 if no drafts are as good."""
        best = 0
        highest = LEAST_GAIN / self.step_s
        num_tokens = 1.0
        is_right = 1.0
        for count in range(1, most + 1):
            is_right *= chance
            num_tokens += is_right
            rate = num_tokens / (self.step_s + self.guess_s + count * self.draft_s)
            if rate > highest:
                best = count
                highest = rate
        return best


class Shares(NamedTuple):
    """What drafts of a row take: `own` those of the draft model, None while their cost is not
    known; `others` those of sources that need no step of their own."""

    own: DraftShare | None
    others: DraftShare


class Trials:
    """When guesses are considered: in every step while they pay; else after a rest, and now and
    then one is made for a trial."""

    def __init__(self) -> None:
        self._num_without = 0  # steps since the last guess
        self._next_look = 0  # value of `_num_without` before which drafts are not considered
        self._next_trial = TRY_AGAIN_STEPS  # value of `_num_without` after which a trial is made
        self._gap = TRY_AGAIN_STEPS  # between two trials
        self._num_right = 0  # drafts that were right so far
        self._was_trial = False  # whether the guesses before the last step were a trial

    def is_due(self) -> bool:
        """Count a step. Returns whether guesses are considered before it."""
        self._num_without += 1
        return self._num_without >= self._next_look

    @property
    def is_due_next(self) -> bool:
        """Whether guesses are considered before the next step."""
        return self._num_without + 1 >= self._next_look

    @property
    def is_trial(self) -> bool:
        return self._num_without > self._next_trial

    def note_right(self, num_right: int) -> None:
        """So many drafts were right so far. After a right one, trials are as frequent as at first.
        A trial that was right is followed by another at once, so a few are enough to see that
        guesses pay again."""
        if num_right == self._num_right:
            self._was_trial = False
            return
        self._num_right = num_right
        self._gap = TRY_AGAIN_STEPS
        self._next_trial = self._gap
        if self._was_trial:
            self._was_trial = False
            self._next_trial = 0
            self._next_look = 0

    def guessed(self) -> None:
        """There are guesses before this step."""
        self._was_trial = self.is_trial
        self._num_without = 0
        self._next_look = 0
        if self._was_trial:
            self._gap = min(2 * self._gap, RAREST_TRIAL_STEPS)
        self._next_trial = self._gap

    def rest(self, num_steps: int) -> None:
        """Guesses do not pay: make none for some steps."""
        self._next_look = self._num_without + num_steps


class SeenSlots:
    """The slots whose tokens the draft model has computed, and slots of its own for each row."""

    def __init__(self, kv: KvMemory, settings: SchedulerSettings) -> None:
        self._kv = kv
        # Where the slots of drafts begin, and the number of such slots per row.
        self._num_slots = settings.num_pages * settings.page_size
        self._num_own = settings.max_draft
        # [num_slots] whether the draft model has computed the token in a slot.
        self._has_seen: BoolArray = np.zeros(self._num_slots, dtype=np.bool_)
        # [num_slots] whether the model has not computed it here, but its KV was read.
        self._is_read: BoolArray = np.zeros(self._num_slots, dtype=np.bool_)
        self._num_read = 0  # how many have been read so far
        # Slots of steps that are not marked yet: while nothing is guessed, marking them together
        # takes a fraction of the time.
        self._written: list[IntArray] = []

    def written(self, slots: IntArray) -> None:
        """The model writes other tokens into these slots."""
        self._written.append(slots)
        if len(self._written) >= MOST_UNMARKED:
            self._mark_written()

    def copied(self, sources: IntArray, targets: IntArray) -> None:
        """K, V and states of the model were copied between these slots."""
        self._mark_written()
        self._has_seen[targets] = False
        if self._num_read:
            self._is_read[targets] = self._is_read[sources]

    def landed(self, pages: IntArray) -> None:
        """Pages were read from a store, which has neither KV of the draft model nor states."""
        self._mark_written()
        slots = slots_of(pages, self._kv.page_size)
        self._has_seen[slots] = False
        self._is_read[slots] = True
        self._num_read += len(slots)

    def has_states(self, row: int, end: int) -> bool:
        """Whether the model itself has computed the first `end` tokens of a row."""
        self._mark_written()
        if not self._num_read:
            return True
        return not self._is_read[self._kv.rows.slots_of(row, 0, end)].any()

    def first_missing(self, row: int, end: int) -> int:
        """The first token of a row that the draft model has not computed; `end` if there is none
        before it."""
        self._mark_written()
        has_seen = self._has_seen[self._kv.rows.slots_of(row, 0, end)]
        if has_seen.all():
            return end
        return int(has_seen.argmin())

    def take(self, guess: Guess) -> tuple[IntArray, IntArray]:
        """The slots of the tokens that the draft model computes for a row [length], and of its
        guesses except the last [count - 1]. Marks these tokens as seen."""
        self._mark_written()
        row, start, length, count, _ = guess
        end = min(start + length, int(self._kv.columns.kv_len[row]))
        known = self._kv.rows.slots_of(row, start, end)
        self._has_seen[known] = True
        own = self._num_slots + row * self._num_own
        of_tokens = np.full(length, own, dtype=np.int32)
        of_tokens[: end - start] = known
        return of_tokens, np.arange(own + 1, own + max(count, 1), dtype=np.int32)

    def _mark_written(self) -> None:
        if not self._written:
            return
        slots = np.concatenate(self._written)
        self._written.clear()
        self._has_seen[slots] = False
        if self._num_read:
            self._is_read[slots] = False


class Guesser:
    """Decides on the work of the draft model."""

    def __init__(
        self,
        kv: KvMemory,
        settings: SchedulerSettings,
        draft: DraftSettings,
        speculator: Speculator,
    ) -> None:
        self._kv = kv
        self._draft = draft
        self._vocab_size = settings.vocab_size
        self._ahead = 1 if draft.is_head else 0
        self._speculator = speculator
        self._source, self._drafts = _model_drafts(speculator)
        self._longest_piece = settings.chunk_len or LONGEST_PIECE
        self._max_draft = settings.max_draft
        self.seen = SeenSlots(kv, settings)
        self._trials = Trials()
        self._rest_len = LOOK_AGAIN_STEPS  # steps without drafts after they did not pay
        self._kept_rows: set[int] = set()  # rows that have drafts of the last guess

    def keep(self, guess: Guess, tokens: IntArray) -> None:
        """Keep the drafts that the draft model has made."""
        request: Request = self._kv.columns.requests[guess.row]
        # the vocabularies of the two models may have different sizes
        is_unknown = tokens >= self._vocab_size
        if is_unknown.any():
            tokens = tokens[: int(is_unknown.argmax())]
        self._kept_rows.add(guess.row)
        self._drafts.keep(request, guess.num_known, tokens.tobytes())
        self._speculator.look_at(guess.row)

    def note_used(self, rows: set[int]) -> None:
        """The next step computes the drafts of these rows. Other kept drafts count as wrong, for
        example those that a grammar does not allow."""
        for row in self._kept_rows - rows:
            if self._kv.columns.requests[row] is not None:
                trust = self._speculator.trust(row)
                trust.rates[self._source].learn(1, 0, FORGET_OF_MODEL)

    @property
    def looks_next(self) -> bool:
        """Whether the next step may be one of the draft model, if all tokens are known then."""
        return self._trials.is_due_next

    def guesses(self, rows: IntArray) -> list[Guess]:
        """The work of the draft model before the next step of `rows`; empty where it does not
        pay."""
        trials = self._trials
        trials.note_right(self._speculator.num_right(self._source))
        if not trials.is_due():
            return []
        found = self._worthwhile(rows, trials.is_trial)
        if found:
            trials.guessed()
        return found

    # Inside

    def _worthwhile(self, rows: IntArray, is_trial: bool) -> list[Guess]:
        speculator = self._speculator
        columns = self._kv.columns
        lens = columns.seq_len.take(rows)
        # A row's last token must be known, and be the only one that the model has not computed: the
        # draft model has one slot for such tokens.
        is_ready = columns.known_len.take(rows) == lens
        if not is_ready.any():
            self._trials.rest(self._rest_len)  # the step before overlaps this one
        is_ready &= columns.kv_len.take(rows) == lens - 1
        is_ready &= columns.max_len.take(rows) > lens + MIN_LEFT
        ready = rows[is_ready]
        model = speculator.pace.model()
        if not len(ready) or model is None:
            return []
        self._kept_rows.clear()
        load = StepLoad(len(rows), int(lens.sum()))
        self._rest_len = LOOK_AGAIN_STEPS * (1 + steps_of_rest(model, load))
        priors = speculator.priors()
        if not is_trial and len(ready) > 4:
            # A new row has only the expected rate of all rows; older rows have their own.
            expected = priors[self._source]
            own, _ = self._shares(model, load, len(rows), int(ready[0]))
            if not self._count(own, expected, self._max_draft):
                self._trials.rest(self._rest_len)
                return []
        found: list[Guess] = []
        room = int(min(self._longest_piece, speculator.pace.drafting_room(self._max_draft)))
        if room < 1:
            return []
        most_rows = len(ready)
        if is_trial:
            most_rows = 1
        elif not speculator.pace.draft_cost.is_known:
            most_rows = MOST_FIRST if len(ready) <= MOST_FIRST else 1
        for row in ready.tolist():
            shares = self._shares(model, load, len(rows), row)
            guess = self._guess(row, shares, priors, room, is_trial)
            if guess is None:
                continue
            found.append(guess)
            room -= guess.length
            if len(found) == most_rows or room < 1:
                break
        return found

    def _shares(self, model: CostModel, load: StepLoad, num_rows: int, row: int) -> Shares:
        cost = self._speculator.pace.draft_cost
        step_s = model.seconds(load) / num_rows
        token_s = model.token_s + model.pair_s * int(self._kv.columns.seq_len[row])
        others = DraftShare(step_s, token_s)
        if not cost.is_known:
            return Shares(None, others)
        own = DraftShare(
            step_s=step_s,
            draft_s=cost.pass_s / num_rows + cost.token_s + token_s,
            guess_s=cost.step_s / num_rows,
            missing_s=cost.token_s,
        )
        return Shares(own, others)

    def _count(self, share: DraftShare | None, chance: float, most: int) -> int:
        if share is None:
            num_seen = self._speculator.pace.draft_cost.num_seen
            return min(1 + num_seen % MOST_FIRST, most)
        return share.best_count(chance, most)

    def _guess(
        self, row: int, shares: Shares, priors: list[float], room: int, is_trial: bool
    ) -> Guess | None:
        """The work for a row; the draft model computes at most `room` tokens of it. `priors`: of
        the sources."""
        speculator = self._speculator
        length = int(self._kv.columns.seq_len[row])
        most = min(speculator.most(row, length), self._draft.context_length - length)
        trust = speculator.trust(row)
        if most < 1 or trust.hindrance or not trust.request.message.shares_kv:
            return None
        chances = speculator.chances(trust, priors)
        chance = chances[self._source]
        own = shares.own
        count = self._count(own, chance, most)
        if count and own is not None:
            num_missing = self._num_missing(row, length) - 1
            if num_missing > 0:
                own = own.after(num_missing, min(most, SPREAD_GUESSES))
                count = self._count(own, chance, most)
        is_doubtful = is_trial and not count
        if is_doubtful:
            count = 1
        if not count:
            trust.rates[self._source].fade(FADE)
            self._trials.rest(self._rest_len)
            return None
        speed = 0.0 if own is None else own.speed(chance, count)
        if self._another_is_as_fast(trust.request, row, chances, shares.others, speed):
            return None
        if is_doubtful:
            speculator.doubt(self._source, row)
        return self._piece(row, length, count, room)

    def _another_is_as_fast(
        self, request: Request, row: int, chances: list[float], share: DraftShare, speed: float
    ) -> bool:
        """Whether the drafts of another source, which cost nothing but their place in the step,
        bring at least `speed` tokens a second."""
        length = int(self._kv.columns.seq_len[row])
        most = self._speculator.most(row, length)
        known: Known | None = None
        for source, chance in zip(self._speculator.sources, chances, strict=True):
            if source is self._drafts:
                continue
            count = share.best_count(chance, most)
            if not count or share.speed(chance, count) < speed:
                continue
            if known is None:
                known = Known(request, self._kv.columns.packed(row, length))
            num_found = len(source.drafts(known, count)) // TOKEN_BYTES
            if num_found and share.speed(chance, num_found) >= speed:
                return True
        return False

    def _num_missing(self, row: int, length: int) -> int:
        """How many of the tokens before a guess the draft model has not seen."""
        last = length - self._ahead
        return last - self.seen.first_missing(row, last - 1) if last > 0 else 0

    def _piece(self, row: int, length: int, count: int, room: int) -> Guess | None:
        """None: the draft model does not know one of the tokens, or a head has no states of one."""
        ahead = self._ahead
        last = length - ahead
        if last < 1 or (ahead and not self.seen.has_states(row, last)):
            return None
        start = self.seen.first_missing(row, last - 1)
        end = min(last, start + room)
        guess = Guess(row, start, end - start, count if end == last else 0, ahead)
        if int(self._kv.columns.tokens[row, guess.ids].max()) >= self._draft.vocab_size:
            return None
        return guess


def _model_drafts(speculator: Speculator) -> tuple[int, ModelDrafts]:
    """The source whose drafts a model makes, and its index."""
    for i, source in enumerate(speculator.sources):
        if isinstance(source, ModelDrafts):
            return i, source
    raise AssertionError("the draft model is no source")
