"""Steps that compute some layers of a prefill give the bits of a prefill in one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.executor.driver import MODEL, Driver, Turn, full_logprobs, make_driver, piece_of
from weft.executor.passes.split import SplitPass
from weft.plan.inputs import InputVectors
from weft.plan.step import LAST_SAMPLED, Plan, Result

NUM_LAYERS = 6
LAYERED = replace(MODEL, num_layers=NUM_LAYERS)
TEXT = [number % 60 + 1 for number in range(90)]


@pytest.fixture(params=["auto", "torch"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Driver, Driver]]:
    """Two runners of one model; the second may split prefills."""
    drivers = [
        make_driver(kernels=request.param, model=LAYERED, split_prefill_layers=layers)
        for layers in (0, 2)
    ]
    yield drivers[0], drivers[1]
    for driver in drivers:
        driver.runner.close()


def run(driver: Driver, plan: Plan) -> Result:
    return driver.runner.launch(plan).result()


def logprobs(result: Result) -> list[list[float]]:
    return full_logprobs(result).tolist()


def test_pieces_with_decode_steps_between_give_the_bits_of_one_step(pair):
    whole, split = pair
    wanted = [run(whole, whole.plan(Turn(1, TEXT[:9])))]
    wanted.append(run(whole, whole.plan(Turn(0, TEXT), Turn(2, TEXT[5:40]))))
    wanted += [run(whole, whole.plan(Turn(1, [LAST_SAMPLED]))) for _ in range(2)]
    wanted.append(run(whole, whole.plan(*(Turn(row, [LAST_SAMPLED]) for row in range(3)))))

    found = [run(split, split.plan(Turn(1, TEXT[:9])))]
    prefill = split.plan(Turn(0, TEXT), Turn(2, TEXT[5:40]))
    between = []
    for first, last in ((0, 2), (2, 4)):
        assert len(run(split, piece_of(prefill, first, last)).tokens) == 0
        between.append(run(split, split.plan(Turn(1, [LAST_SAMPLED]))))
    found.append(run(split, piece_of(prefill, 4, NUM_LAYERS)))
    found += between
    found.append(run(split, split.plan(*(Turn(row, [LAST_SAMPLED]) for row in range(3)))))

    for one, other in zip(wanted, found, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert logprobs(one) == logprobs(other)


def test_requests_that_leave_between_pieces_change_nothing_for_the_others(pair):
    whole, split = pair
    wanted = run(whole, whole.plan(Turn(2, TEXT[5:40])))
    both = split.plan(Turn(0, TEXT), Turn(2, TEXT[5:40]))
    run(split, piece_of(both, 0, 3))
    rest = replace(
        both,
        rows=both.rows[1:],
        starts=both.starts[1:],
        lens=both.lens[1:],
        tokens=both.tokens[len(TEXT) :],
        slots=both.slots[len(TEXT) :],
    )
    run(split, piece_of(rest, 3, 4, kept=list(range(len(TEXT), len(TEXT) + 35))))
    last = split.plan(Turn(2, []))
    last = replace(
        rest,
        samples=np.ones(1, np.bool_),
        sampling=replace(last.sampling, positions=rest.lens),
        outputs=last.outputs,
    )
    found = run(split, piece_of(last, 4, NUM_LAYERS))
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert logprobs(found) == logprobs(wanted)


def test_vectors_stand_for_tokens_in_the_first_piece(pair):
    whole, split = pair
    given = np.random.default_rng(0).standard_normal((3, LAYERED.hidden_size), dtype=np.float32)
    vectors = InputVectors(index=np.array([1, 4, 5], dtype=np.int32), rows=given)
    results = []
    wanted = replace(whole.plan(Turn(0, TEXT[:20])), inputs=(vectors,))
    results.append(run(whole, wanted))
    plan = split.plan(Turn(0, TEXT[:20]))
    run(split, piece_of(replace(plan, inputs=(vectors,)), 0, 1))
    results.append(run(split, piece_of(plan, 1, NUM_LAYERS)))
    assert logprobs(results[0]) == logprobs(results[1])


def test_a_prefill_that_is_given_up_leaves_nothing_for_the_next(pair):
    whole, split = pair
    wanted = run(whole, whole.plan(Turn(0, TEXT[:30])))
    run(split, piece_of(split.plan(Turn(3, TEXT)), 0, 2))
    plan = split.plan(Turn(0, TEXT[:30]))
    run(split, piece_of(plan, 0, 5))
    found = run(split, piece_of(plan, 5, NUM_LAYERS))
    assert logprobs(found) == logprobs(wanted)
    (splitting,) = split.runner.passes
    assert isinstance(splitting, SplitPass)
    assert splitting._pieces._carried is None


def test_a_runner_that_splits_nothing_has_no_steps_for_it(pair):
    whole, _ = pair
    assert not whole.runner.passes
    assert torch.is_tensor(whole.steps._rows.slots)
