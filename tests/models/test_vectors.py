"""Vectors that go into a model instead of token ids, and those that come out of it instead of
tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.executor.driver import Driver, Turn, full_logprobs, ints
from tests.models.errors import TOLERANCE, relative_error
from weft.plan.inputs import InputVectors
from weft.plan.outputs import HiddenStatesRequest, TokenStates
from weft.plan.step import Plan, find


def asking(plan: Plan, counts: list[int]) -> Plan:
    """The hidden states of the last `counts` tokens of each request are wanted, too."""
    ends = np.cumsum(plan.lens)
    places = [
        place for end, count in zip(ends, counts, strict=True) for place in range(end - count, end)
    ]
    asked = [i for i, count in enumerate(counts) if count]
    wanted = HiddenStatesRequest(ints(asked), ints(counts[i] for i in asked), ints(places))
    return replace(plan, outputs=(*plan.outputs, wanted))


def told(driver: Driver, plan: Plan) -> torch.Tensor:
    found = find(driver.runner.launch(plan).result().outputs, TokenStates)
    assert found is not None
    return torch.from_numpy(found.states)


@pytest.mark.pairs
@pytest.mark.parametrize("chunk", [5, 64])
def test_hidden_states_are_the_last_ones_of_transformers(reference, drive, prompt, chunk):
    """Of a prompt in chunks that sample nothing but at its end, beside a request that wants none,
    then of one that decodes."""
    driver = drive(reference.folder)
    tokens = prompt(70, 34)
    driver.run(Turn(1, tokens[:3]))
    states = []
    for at in range(0, 33, chunk):
        piece = tokens[at : min(at + chunk, 33)]
        plan = driver.plan(Turn(1, [7]), Turn(2, piece, samples=at + chunk >= 33))
        states.append(told(driver, asking(plan, [0, len(piece)])))
    states.append(told(driver, asking(driver.plan(Turn(2, tokens[33:]), Turn(1, [8])), [1, 0])))
    with torch.inference_mode():
        expected = reference.exact.model(torch.tensor([tokens])).last_hidden_state[0]
    assert relative_error(torch.cat(states), expected) < TOLERANCE


@pytest.mark.pairs
@pytest.mark.parametrize("chunk", [1, 6, 64])
def test_rows_of_the_embedding_given_as_vectors_are_as_good_as_ids(reference, drive, prompt, chunk):
    """Bit for bit, beside requests that come with ids."""
    driver = drive(reference.folder)
    tokens = prompt(71, 25)
    other = prompt(72, 64)
    with torch.inference_mode():
        rows = reference.exact.get_input_embeddings()(torch.tensor(tokens)).numpy()
    for at in range(0, len(tokens), chunk):
        piece = tokens[at : at + chunk]
        by_ids = driver.run(Turn(0, other[at : at + 2]), Turn(1, piece))
        plan = driver.plan(Turn(2, other[at : at + 2]), Turn(3, [0] * len(piece)))
        index = ints(range(len(other[at : at + 2]), plan.num_tokens))
        plan = replace(plan, inputs=(InputVectors(index=index, rows=rows[at : at + chunk]),))
        assert torch.equal(full_logprobs(driver.runner.launch(plan).result()), by_ids)
    following = driver.run(Turn(1, [5]), Turn(3, [5]))
    assert torch.equal(following[0], following[1])


def test_a_vector_that_is_not_finite_harms_its_request_alone(reference, drive, prompt):
    driver = drive(reference.folder)
    tokens = prompt(73, 9)
    alone = driver.run(Turn(0, tokens))[0]
    plan = driver.plan(Turn(1, tokens), Turn(2, tokens), Turn(3, tokens))
    rows = np.full((1, reference.exact.config.hidden_size), np.nan, dtype=np.float32)
    result = driver.runner.launch(replace(plan, inputs=(InputVectors(ints([11]), rows),))).result()
    assert result.invalid is not None
    assert result.invalid.tolist() == [False, True, False]
    assert relative_error(full_logprobs(result)[[0, 2]], torch.stack([alone, alone])) < TOLERANCE
