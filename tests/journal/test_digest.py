"""Digests of plans: equal decisions have equal ones, and no two operations cancel each other
out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.executor.driver import ints, sampler_plan
from weft.journal.digest import digest, launched
from weft.journal.records import VERSION
from weft.plan.logits import GrammarMask, LogitOp, ProcessorCall
from weft.plan.outputs import HiddenStatesRequest


def call(name: str = "p", **params: object) -> ProcessorCall:
    return ProcessorCall(name, ints([0]), (params,), (ints([1, 2]),), (1,))


def logits_digest(*ops: LogitOp) -> int:
    return launched(sampler_plan([5], *ops), VERSION).logits


def test_two_equal_calls_of_a_processor_are_not_none() -> None:
    assert len({logits_digest(*[call()] * num) for num in range(4)}) == 4


def test_name_and_parameters_of_a_processor_are_part_of_the_digest() -> None:
    calls = [call(), call("q"), call(a=1), call(a=2), call(b=1)]
    assert len({logits_digest(one) for one in calls}) == len(calls)
    assert logits_digest(call(a=1, b=2)) == logits_digest(call(b=2, a=1))


def test_an_operation_of_another_type_has_another_digest() -> None:
    index = ints([0])
    assert digest((HiddenStatesRequest(index, index, index),)) != digest(())
    assert digest(index) != digest(index.astype(np.int64))


def test_the_bits_of_a_grammar_are_not_looked_at() -> None:
    mask = GrammarMask(ints([0]), object())  # type: ignore[arg-type]
    other = replace(mask, index=ints([1]))
    assert logits_digest(mask) == logits_digest(replace(mask, bitmask=None))  # type: ignore[arg-type]
    assert logits_digest(mask) != logits_digest(other)
