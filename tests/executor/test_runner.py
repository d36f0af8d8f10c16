from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.executor.driver import MODEL, Driver, Turn, asking, full_logprobs, ints, make_driver
from weft.plan.logits import Penalties
from weft.plan.step import LAST_SAMPLED

TEXT = list(range(1, 21))


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = make_driver()
    yield driver
    driver.runner.close()


def test_launch_returns_before_the_step_is_done(driver, monkeypatch):
    gate = threading.Event()
    model = driver.steps._model
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args: gate.wait(240) and forward(*args))
    steps = [driver.launch(Turn(0, TEXT)), driver.launch(Turn(0, [LAST_SAMPLED]))]
    assert not any(step.done() for step in steps)
    gate.set()
    assert all(len(step.result().tokens) == 1 for step in steps)
    assert all(step.done() for step in steps)


def test_all_work_is_done_by_one_thread(driver, monkeypatch):
    threads = set()
    model = driver.steps._model
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda *args: threads.add(threading.get_ident()) or forward(*args)
    )
    for _ in range(3):
        driver.run(Turn(0, [1]))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_step_that_fails_says_so_and_the_next_one_works(driver):
    expected = driver.run(Turn(0, TEXT))
    bad = driver.plan(Turn(1, TEXT))
    failed = driver.runner.launch(replace(bad, tokens=ints([10_000] * len(TEXT))))
    following = driver.launch(Turn(2, TEXT))
    with pytest.raises(IndexError):
        failed.result()
    assert torch.equal(full_logprobs(following.result()), expected)


def test_a_middle_chunk_samples_nothing(driver):
    assert driver.launch(Turn(0, TEXT[:7], samples=False)).result().tokens.tolist() == []
    rest = driver.run(Turn(0, TEXT[7:]))
    assert torch.allclose(rest, driver.run(Turn(1, TEXT)), atol=1e-5)


def test_the_token_sampled_last_is_kept_for_each_row(driver):
    """Also while other rows sample, and while the row itself runs a chunk that does not."""
    first = driver.launch(Turn(3, TEXT), Turn(5, TEXT[:4])).result().tokens.tolist()
    driver.run(Turn(5, [7]))
    driver.launch(Turn(6, TEXT[:3], samples=False)).result()
    actual = driver.run(Turn(3, [LAST_SAMPLED]))
    assert torch.allclose(actual, driver.run(Turn(0, [*TEXT, first[0]])), atol=1e-5)


def test_penalties_count_the_token_that_only_the_device_knows(driver):
    first = int(driver.launch(Turn(0, TEXT)).result().tokens[0])
    plan = driver.plan(Turn(0, [LAST_SAMPLED]))
    penalties = Penalties(
        index=ints([0]),
        frequency=np.zeros(1, np.float32),
        presence=np.full(1, 1e4, np.float32),
        repetition=np.ones(1, np.float32),
        history=ints(TEXT),
        offsets=ints([0, len(TEXT)]),
        output_starts=ints([len(TEXT)]),
        lacks_last=np.array([True]),
    )
    plan = asking(plan, penalties, *plan.outputs)
    result = full_logprobs(driver.runner.launch(plan).result())[0]
    assert [token for token in range(MODEL.vocab_size) if result[token] < -5_000] == [first]


def test_a_request_that_is_not_finite_is_invalid_alone(driver):
    """Its K and V are NaN, and stay in the cache beside those of the others."""
    driver.run(Turn(0, TEXT[:9]), Turn(1, TEXT[:9]), Turn(2, TEXT[:9]))
    driver.steps._attention._pool.k[0][driver.slots[1]] = torch.nan
    steps = [driver.launch(*(Turn(row, [LAST_SAMPLED]) for row in range(3))) for _ in range(3)]
    for step in steps:
        result = step.result()
        assert result.invalid is not None
        assert result.invalid.tolist() == [False, True, False]
        assert result.tokens[0] == result.tokens[2]
        assert result.tokens[1] == 0


def test_the_batch_does_not_change_what_a_request_gets(driver):
    alone = driver.run(Turn(0, TEXT))
    together = driver.run(Turn(1, TEXT[:3]), Turn(2, TEXT), Turn(3, [5]))
    assert torch.allclose(together[1], alone[0], atol=1e-5)
