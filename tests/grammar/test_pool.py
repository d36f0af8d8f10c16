"""Who is next at compiling grammars."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from weft.grammar.pool import LONG_LEN, WAIT_S, GrammarPool
from weft.grammar.protocol import CompileResult, InvalidGrammar, Key

HANG_S = 240


class Desk:
    """A pool whose grammars are all invalid, and compiled one at a time when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.begun: list[str] = []
        self.has_begun = threading.Semaphore(0)
        self.may_end: defaultdict[str, threading.Event] = defaultdict(threading.Event)  # by name
        self.rung = threading.Semaphore(0)
        self.pool = GrammarPool(
            lambda: self,  # type: ignore[arg-type,return-value]
            max_bytes=0,
            notify=self.rung.release,
            clock=lambda: self.now_s,
        )

    def compile(self, key: Key) -> Any:
        name = key.text[:2]
        self.begun.append(name)
        self.has_begun.release()
        assert self.may_end[name].wait(HANG_S)
        raise InvalidGrammar(name)

    def wait_begun(self, num: int) -> None:
        for _ in range(num):
            assert self.has_begun.acquire(timeout=HANG_S)

    def verdicts(self, num: int) -> list[CompileResult]:
        found: list[CompileResult] = []
        while len(found) < num:
            assert self.rung.acquire(timeout=HANG_S)
            found += self.pool.take()
        return found


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.now_s = 1e9  # nothing more begins
    for name in [f"{letter}{number}" for letter in "abcls" for number in range(10)]:
        desk.may_end[name].set()
    desk.pool.close()


def test_tenants_take_turns_however_many_grammars_one_of_them_brings(desk: Desk) -> None:
    for number in range(6):
        desk.pool.ask(number, Key("regex", f"a{number}"), "a")
        if number < 2:
            desk.wait_begun(1)
    desk.pool.ask(6, Key("regex", "b0"), "b")
    desk.pool.ask(7, Key("regex", "c0"), "c")
    for place in range(6):
        desk.may_end[desk.begun[place]].set()
        desk.wait_begun(1)
    assert desk.begun == ["a0", "a1", "a2", "b0", "c0", "a3", "a4", "a5"]


def test_long_grammars_leave_a_thread_to_the_others(desk: Desk) -> None:
    for number in range(4):
        desk.pool.ask(number, Key("regex", f"l{number}" + "x" * LONG_LEN))
    desk.wait_begun(1)
    for number in range(4, 8):
        desk.pool.ask(number, Key("regex", f"s{number}"))
        desk.wait_begun(1)  # though the first long one has not ended
        desk.may_end[f"s{number}"].set()
        desk.verdicts(1)
    assert desk.begun == ["l0", "s4", "s5", "s6", "s7"]
    desk.may_end["l0"].set()
    desk.wait_begun(1)
    assert desk.begun[-1] == "l1"


def test_a_grammar_that_waited_too_long_gets_503_and_is_not_compiled(desk: Desk) -> None:
    desk.pool.ask(0, Key("regex", "a0"))
    desk.pool.ask(1, Key("regex", "a1"))
    desk.wait_begun(2)
    desk.pool.ask(2, Key("regex", "a2"))
    desk.now_s += WAIT_S + 1  # those that are being compiled are not asked for their time
    desk.may_end["a0"].set()
    found = {verdict.id: verdict for verdict in desk.verdicts(2)}
    assert found[2].status == 503
    assert "try again" in found[2].message
    assert desk.begun == ["a0", "a1"]
    desk.pool.ask(3, Key("regex", "a2"))  # that is not remembered
    desk.wait_begun(1)
    assert desk.begun[-1] == "a2"


def test_a_compiler_that_was_prepared_is_not_made_again(desk: Desk) -> None:
    made = threading.Semaphore(0)

    def make() -> Any:
        made.release()
        return desk

    pool = GrammarPool(make, max_bytes=0, notify=desk.rung.release, clock=lambda: 0.0)
    pool.prepare()
    assert made.acquire(timeout=HANG_S)
    desk.may_end["a0"].set()
    pool.ask(0, Key("regex", "a0"))
    assert desk.rung.acquire(timeout=HANG_S)
    assert not made.acquire(blocking=False)
    pool.close()


def test_what_prevents_a_compiler_is_told_to_each_request(desk: Desk) -> None:
    tried = threading.Semaphore(0)

    def fail() -> Any:
        tried.release()
        raise InvalidGrammar("no such vocabulary")

    pool = GrammarPool(fail, max_bytes=0, notify=desk.rung.release, clock=lambda: 0.0)
    pool.prepare()
    assert tried.acquire(timeout=HANG_S)
    pool.ask(0, Key("regex", "a0"))
    assert desk.rung.acquire(timeout=HANG_S)
    (result,) = pool.take()
    assert "no such vocabulary" in result.message
    pool.close()
