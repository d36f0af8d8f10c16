from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.executor.driver import MODEL, Driver, Turn, asking, ints, logprobs_of, make_driver
from weft.executor.outputs import prompt_logprobs as module
from weft.plan.outputs import PromptLogprobs, PromptLogprobsRequest, SampledLogprobsRequest
from weft.plan.step import LAST_SAMPLED, find

TEXT = [7 * i % MODEL.vocab_size for i in range(40)]


@pytest.fixture(params=["torch", "auto"])
def driver(request):
    driver = make_driver(kernels=request.param)
    yield driver
    driver.runner.close()


def told(driver: Driver, wanted: PromptLogprobsRequest, *turns: Turn) -> PromptLogprobs:
    plan = driver.plan(*turns)
    plan = replace(plan, outputs=(*plan.outputs, wanted))
    found = find(driver.runner.launch(plan).result().outputs, PromptLogprobs)
    assert found is not None
    return found


def whole(
    first: int, length: int, num_top: int = 0, ids: tuple[int, ...] = ()
) -> PromptLogprobsRequest:
    """Of TEXT[:length], whose first token stands at `first` in the step."""
    places = ints(range(first, first + length - 1))
    targets = ints(TEXT[1:length])
    wanted_ids = np.array([ids], dtype=np.int32)
    return PromptLogprobsRequest(
        ints([0]), ints([length - 1]), ints([num_top]), wanted_ids, places, targets
    )


def expected(driver: Driver, tokens: list[int], row: int) -> torch.Tensor:
    """Log probabilities after each token, one step a token: [T, V]."""
    return torch.stack([driver.run(Turn(row, [token]))[0] for token in tokens]).double()


def test_each_token_is_reported_in_the_light_of_those_before_it(driver):
    rows = expected(driver, TEXT, 0)[:-1]
    given = told(driver, whole(0, len(TEXT), 5, (3, 60)), Turn(1, TEXT))
    targets = torch.tensor(TEXT[1:])[:, None]
    own = rows.gather(1, targets)
    assert np.allclose(given.logprobs, own[:, 0], atol=1e-5)
    assert given.ranks.tolist() == ((rows > own).sum(1) + 1).tolist()
    assert np.allclose(given.top_logprobs, rows.topk(5).values, atol=1e-5)
    assert np.allclose(
        given.top_logprobs, rows.numpy()[np.arange(len(rows))[:, None], given.top_ids], atol=1e-5
    )
    assert np.allclose(given.id_logprobs, rows[:, [3, 60]], atol=1e-5)


def test_a_block_more_or_less_changes_nothing_and_no_block_is_larger(driver, monkeypatch):
    wanted = whole(0, len(TEXT), 3)
    model = driver.steps._model
    lens = []
    at_once = told(driver, wanted, Turn(0, TEXT))
    logits = model.logits

    def counted(hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        lens.append(len(places))
        return logits(hidden, places)

    monkeypatch.setattr(model, "logits", counted)
    monkeypatch.setattr(module, "BLOCK_LEN", 16)
    in_blocks = told(driver, wanted, Turn(1, TEXT))
    assert lens == [16, 16, 7, 1]  # and the token that is sampled
    for name in PromptLogprobs.__slots__:
        assert np.allclose(getattr(in_blocks, name), getattr(at_once, name), atol=1e-5), name


def test_requests_of_one_step_get_what_they_asked_for_beside_each_other_and_beside_decoding(driver):
    driver.run(Turn(2, TEXT[:9]))
    wanted = PromptLogprobsRequest(
        index=ints([0, 1]),
        counts=ints([4, 2]),
        num_top=ints([0, 2]),
        ids=np.array([[5, 6], [7, 0]], dtype=np.int32),
        places=ints([0, 1, 2, 3, 6, 7]),
        targets=ints([*TEXT[1:5], *TEXT[2:4]]),
    )
    given = told(driver, wanted, Turn(0, TEXT[:5]), Turn(1, TEXT[:4]), Turn(2, [LAST_SAMPLED]))
    rows = expected(driver, TEXT[:4], 3)
    assert given.top_ids.shape == (6, 2)
    assert np.allclose(
        given.logprobs, [rows[i, TEXT[i + 1]] for i in (0, 1, 2, 3, 1, 2)], atol=1e-5
    )
    assert np.allclose(given.id_logprobs[:4], rows[:, [5, 6]], atol=1e-5)
    assert np.allclose(given.id_logprobs[4:, 0], rows[1:3, 7], atol=1e-5)


def test_nothing_to_tell_is_nothing(driver):
    given = told(driver, whole(0, 1, 4, (1,)), Turn(0, TEXT[:1]))
    assert [getattr(given, name).shape[0] for name in PromptLogprobs.__slots__] == [0] * 5


def test_given_tokens_are_reported_beside_the_sampled_one(driver):
    plan = driver.plan(Turn(0, TEXT), Turn(1, TEXT[:6]))
    wanted = SampledLogprobsRequest(
        ints([0, 1]), ints([MODEL.vocab_size] * 2), np.array([[2, 3], [4, 0]], dtype=np.int32)
    )
    found = logprobs_of(driver.runner.launch(asking(plan, wanted)).result())
    assert found.id_logprobs is not None
    everything = np.zeros_like(found.top_logprobs)
    np.put_along_axis(everything, found.top_ids.astype(np.int64), found.top_logprobs, axis=1)
    assert np.allclose(found.id_logprobs[0], everything[0, [2, 3]], atol=1e-5)
    assert np.allclose(found.id_logprobs[1, :1], everything[1, [4]], atol=1e-5)
