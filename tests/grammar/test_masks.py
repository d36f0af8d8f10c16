"""Masks on their way: which thread fills them, which one waits, and that no thread touches a
matcher meanwhile. The plain twin follows choices, and fills masks when the test lets it."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.grammar.choice import ChoiceCompiler, ChoiceMatcher
from weft.grammar.masks import LazyBitmaskRow, LazyBitmaskRows, LazyBitmasks, Words
from weft.grammar.pool import FEW, PART, GrammarPool
from weft.grammar.protocol import CONTINUE, Compiled, Constraint, GrammarMatcher, Key
from weft.plan.logits import GrammarMask

LETTERS = [bytes([token]) for token in range(128)]
CHOICES = ["abcd", "abxy", "acid", "back"]
A, B, C = map(ord, "abc")
PATIENCE_S = 240


class Noted(ChoiceMatcher):
    """Notes when it takes a token while its mask is filled."""

    library: Held
    is_filled = False  # now

    def fork(self) -> Noted:
        forked = Noted(self.vocabulary, self.eos, self.left)
        forked.library = self.library
        return forked

    def consume(self, token: int) -> bool:
        self.library.num_disturbed += self.is_filled
        self.library.took.set()
        return super().consume(token)


class Held(ChoiceCompiler):
    """Fills while `may_fill` is set, and notes in which thread."""

    def __init__(self) -> None:
        super().__init__(LETTERS, frozenset({0}))
        self.may_fill, self.took = threading.Event(), threading.Event()
        self.began, self.second_began = threading.Event(), threading.Event()
        self.may_fill.set()
        self.compiled = threading.Semaphore(0)  # released by the pool for each grammar
        self.threads: list[str] = []  # of each fill since a grammar was compiled
        self.filled: list[int] = []  # how many masks each of them filled
        self.num_disturbed = 0
        self.lingers_s = 0.0  # with a fill, unless a token is taken

    def compile(self, key: Key) -> Compiled:
        compiled = super().compile(key)
        assert isinstance(compiled.matcher, ChoiceMatcher)
        matcher = Noted(LETTERS, compiled.matcher.eos, compiled.matcher.left)
        matcher.library = self
        self.threads.clear()
        self.began.clear()
        self.second_began.clear()
        self.filled.clear()
        return Compiled(matcher, compiled.mask, 1)

    def fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
        self.threads.append(threading.current_thread().name)
        (self.second_began if self.began.is_set() else self.began).set()
        assert self.may_fill.wait(PATIENCE_S)
        self._mark(matchers, True)
        self.took.clear()
        self.took.wait(self.lingers_s)
        super().fill(matchers, masks)
        self._mark(matchers, False)
        self.filled.append(len(matchers))

    def _mark(self, matchers: Sequence[GrammarMatcher], is_filled: bool) -> None:
        for matcher in matchers:
            if isinstance(matcher, Noted):
                matcher.is_filled = is_filled


@pytest.fixture
def library() -> Iterator[Held]:
    library = Held()
    yield library
    library.may_fill.set()


@pytest.fixture
def pool(library: Held) -> Iterator[GrammarPool]:
    pool = GrammarPool(
        lambda: library, max_bytes=1_000_000, beside=True, notify=library.compiled.release
    )
    yield pool
    library.may_fill.set()
    pool.close()


def begun(pool: GrammarPool, library: Held, number: int, *choices: str) -> list[Constraint]:
    """So many outputs, at the beginning of the choices."""
    pool.ask(0, Key("choice", json.dumps(choices or CHOICES)))
    while not pool.has_news:
        assert library.compiled.acquire(timeout=PATIENCE_S)
    [first] = pool.take()
    for id in range(1, number):
        pool.ask(id, Key("choice", json.dumps(choices or CHOICES)))
    found = [verdict.constraint for verdict in (first, *pool.take())]
    return [constraint for constraint in found if constraint is not None]


def advance(pool: GrammarPool, constraints: list[Constraint], token: int) -> None:
    num = len(constraints)
    assert pool.advance(constraints, [token] * num, [0] * num) == [CONTINUE] * num


def allowed(words: Words) -> list[str]:
    """What each row allows."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return ["".join(map(chr, np.flatnonzero(row))) for row in bits]


def words_of(constraints: list[Constraint]) -> Words:
    """As a step asks for them."""
    return LazyBitmaskRows([constraint.mask for constraint in constraints]).words


def test_a_token_is_answered_before_the_masks_behind_it_are_filled(
    pool: GrammarPool, library: Held
) -> None:
    constraints = begun(pool, library, FEW)
    library.may_fill.clear()
    advance(pool, constraints, A)
    assert library.began.wait(PATIENCE_S)
    assert not library.filled
    library.may_fill.set()
    assert allowed(words_of(constraints)) == ["bc"] * FEW
    assert library.threads == ["masks_0"]


def test_where_the_model_takes_all_processors_the_caller_fills_all_masks_at_once(
    library: Held,
) -> None:
    pool = GrammarPool(lambda: library, max_bytes=1_000_000, notify=library.compiled.release)
    constraints = begun(pool, library, 3 * PART)
    advance(pool, constraints, A)
    assert not library.threads
    assert allowed(words_of(constraints)) == ["bc"] * 3 * PART
    assert library.filled == [3 * PART]
    assert library.threads == [threading.current_thread().name]
    pool.close()


def test_few_masks_are_filled_by_their_caller(pool: GrammarPool, library: Held) -> None:
    constraints = begun(pool, library, FEW - 1)
    advance(pool, constraints, A)
    assert not library.threads
    assert allowed(words_of(constraints)) == ["bc"] * (FEW - 1)
    assert library.threads == [threading.current_thread().name]


def test_the_caller_fills_masks_that_no_thread_has_begun(pool: GrammarPool, library: Held) -> None:
    constraints = begun(pool, library, 2 * PART)
    library.may_fill.clear()
    advance(pool, constraints, A)
    assert library.began.wait(PATIENCE_S)  # the thread is held up in the first part
    asking = threading.Thread(target=lambda: words_of(constraints), name="asking")
    asking.start()
    assert library.second_began.wait(PATIENCE_S)
    library.may_fill.set()
    asking.join()
    assert library.threads == ["masks_0", "asking"]
    assert allowed(words_of(constraints)) == ["bc"] * len(constraints)
    assert library.filled == [PART, PART], "each is filled once"


def test_a_matcher_takes_no_token_while_its_mask_is_filled(
    pool: GrammarPool, library: Held
) -> None:
    constraints = begun(pool, library, 3 * PART)
    library.lingers_s = 0.02
    advance(pool, constraints, A)
    advance(
        pool, constraints, C
    )  # no step has asked for the masks between: it has failed, or they were not in it
    assert allowed(words_of(constraints)) == ["i"] * len(constraints)
    assert library.num_disturbed == 0


def test_a_thread_that_is_gone_leaves_its_mask_to_the_others(
    pool: GrammarPool, library: Held
) -> None:
    constraints = begun(pool, library, PART)
    library.may_fill.clear()
    advance(pool, constraints, A)
    del constraints[::2]  # aborted
    library.may_fill.set()
    assert allowed(words_of(constraints)) == ["bc"] * len(constraints)


def test_a_pool_that_is_closed_ends_the_fill_under_way_and_begins_no_other(
    pool: GrammarPool, library: Held
) -> None:
    constraints = begun(pool, library, FEW)
    others = begun(pool, library, FEW, "ax", "ay")
    library.may_fill.clear()
    advance(pool, constraints, A)
    advance(pool, others, A)
    assert library.began.wait(PATIENCE_S)
    closing = threading.Thread(target=pool.close)
    closing.start()
    library.may_fill.set()
    closing.join()
    assert len(library.filled) in (1, 2)
    assert set(library.threads) == {"masks_0"}
    assert allowed(words_of([*constraints, *others])) == ["bc"] * FEW + ["xy"] * FEW


def test_an_output_that_cannot_go_on_is_reported_with_the_mask_and_the_others_go_on(
    pool: GrammarPool, library: Held
) -> None:
    stuck = begun(pool, library, FEW, "aé", "aü")
    fine = begun(pool, library, FEW)
    advance(pool, [*stuck, *fine], A)
    rows = LazyBitmaskRows([constraint.mask for constraint in (*fine, *stuck)])
    reason = "the output cannot go on in its grammar: nothing may follow"
    assert dict(rows.faults) == {FEW + i: reason for i in range(FEW)}
    assert allowed(rows.words)[:FEW] == ["bc"] * FEW


def test_what_a_plan_carries_can_be_sent_to_another_process(
    pool: GrammarPool, library: Held
) -> None:
    constraints = begun(pool, library, FEW)
    advance(pool, constraints, A)
    mask = GrammarMask(
        np.arange(FEW, dtype=np.int32),
        LazyBitmaskRows([constraint.mask._replace(also=B + 1) for constraint in constraints]),
    )
    sent = pickle.loads(pickle.dumps(mask))
    assert allowed(sent.bitmask.words) == ["bc"] * FEW
    assert not sent.bitmask.faults


@pytest.mark.parametrize("token", [3, 31, 32, 63])
def test_a_token_besides_is_allowed_in_one_row_alone(token: int) -> None:
    masks = LazyBitmasks(np.zeros((2, 2), dtype=np.int32))
    rows = LazyBitmaskRows(
        [LazyBitmaskRow(masks, 0, token), LazyBitmaskRow(masks, 0), LazyBitmaskRow(masks, 1, 64)]
    )
    bits = np.unpackbits(rows.words.view(np.uint8), axis=1, bitorder="little")
    assert np.argwhere(bits).tolist() == [[0, token]], "64 has no bit"
