"""Engines that compile grammars, and outputs that obey them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.grammar.choice import ChoiceCompiler
from tests.scheduler.oracle_runner import OracleRunner
from tests.scheduler.world import EOS, VOCAB
from weft.grammar.pool import GrammarPool
from weft.grammar.protocol import Key
from weft.messages.sampling import Grammar
from weft.plan.logits import GrammarMask
from weft.plan.step import Plan, Result, find

VOCABULARY = [bytes([token - 4]) if 4 <= token < 260 else b"" for token in range(VOCAB)]
WORDS = ["yes", "no", "maybe later", "no, and never again, whatever may come"]
PROMPT = list(range(10, 40))


class Gate:
    """A trial that lasts until the test lets it end."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.fails: Exception | None = None

    def run(self, key: Key) -> None:
        assert self.opened.wait(240)
        if self.fails is not None:
            raise self.fails

    def close(self) -> None:
        pass


class Bench:
    """A grammar service, and what of it a test holds in its hands."""

    def __init__(self, compiler: ChoiceCompiler | None = None, *, jump: bool = True) -> None:
        self.gate = Gate()
        self.gate.opened.set()
        self.rung = threading.Event()
        self.compiler = compiler or ChoiceCompiler(VOCABULARY, frozenset({EOS}))
        self.pool = GrammarPool(
            lambda: self.compiler,
            max_bytes=1_000_000,
            make_sandbox=lambda: self.gate,
            notify=self.rung.set,
            jump=jump,
            beside=True,
        )


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.gate.opened.set()
    bench.pool.close()


def obey_masks(runner: OracleRunner) -> None:
    """From now on the oracle chooses among what its plan allows."""
    execute = runner.execute

    def masked(plan: Plan) -> Result:
        result = execute(plan)
        mask = find(plan.logits, GrammarMask)
        if mask is None:
            return result
        tokens = result.tokens.copy()
        rows = np.repeat(plan.rows, plan.num_sampled)
        faults = {int(mask.index[place]): fault for place, fault in mask.bitmask.faults.items()}
        for i, words in zip(mask.index.tolist(), mask.bitmask.words, strict=True):
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if i not in faults and tokens[i] not in allowed:
                tokens[i] = allowed[tokens[i] % len(allowed)]
            runner.last[rows[i]] = tokens[i]
        return Result(
            tokens,
            invalid=np.isin(np.arange(len(tokens)), list(faults)),
            faults=tuple(faults.items()),
        )

    runner.execute = masked  # type: ignore[method-assign]


def choice(*texts: str) -> Grammar:
    return Grammar("choice", json.dumps(texts or WORDS))


def until_compiled(world: Any, bench: Bench) -> None:
    assert bench.rung.wait(240)
    world.step()
