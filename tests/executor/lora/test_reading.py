"""An adapter is read beside steps, and put in between two of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.driver import Turn
from tests.executor.lora.adapters import (
    ALL,
    QV,
    load,
    logprobs_with,
    make_adapter,
    merged_logprobs,
)
from weft.executor.lora import table
from weft.executor.lora.read import inspect_adapter
from weft.plan.device import ReadAdapter

TOKENS = [(7 * number + 3) % 120 + 5 for number in range(9)]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_steps_are_computed_while_an_adapter_is_read(
    base, drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    driver = drive(base, num_adapter_slots=2, kernels=kernels)
    other = make_adapter(base, tmp_path / "other", base.modules(QV), seed=1)
    made = make_adapter(base, tmp_path / "made", base.modules(ALL), seed=2)
    assert load(driver, base, 0, other.folder).ok
    alone = logprobs_with(driver, [0], Turn(0, TOKENS))
    may_read = threading.Event()
    read_adapter = table.read_adapter

    def held(*args: Any, **settings: Any) -> Any:
        may_read.wait()
        return read_adapter(*args, **settings)

    monkeypatch.setattr(table, "read_adapter", held)
    uid = inspect_adapter(made.folder, base.config).uid
    reading = driver.runner.control(ReadAdapter(str(made.folder), uid))
    try:
        # Each of these would wait for ever, did it wait for the file.
        assert torch.equal(logprobs_with(driver, [0], Turn(1, TOKENS)), alone)
        assert not reading.done()
    finally:
        may_read.set()
    assert reading.result().ok
    assert torch.equal(logprobs_with(driver, [0], Turn(2, TOKENS)), alone)

    def never(*args: Any, **settings: Any) -> Any:
        raise AssertionError("it is read twice")

    monkeypatch.setattr(table, "read_adapter", never)
    assert load(driver, base, 1, made.folder, uid).ok
    own = logprobs_with(driver, [1], Turn(3, TOKENS))
    torch.testing.assert_close(own, merged_logprobs(base, made, TOKENS)[-1:], atol=2e-4, rtol=0)
    assert torch.equal(logprobs_with(driver, [0], Turn(4, TOKENS)), alone)


def test_a_read_that_fails_changes_nothing(base, drive, tmp_path: Path) -> None:
    driver = drive(base, kernels="auto")
    made = make_adapter(base, tmp_path / "made", base.modules(QV))
    assert load(driver, base, 0, made.folder).ok
    before = logprobs_with(driver, [0], Turn(0, TOKENS))
    reply = driver.runner.control(ReadAdapter(str(made.folder), "0" * 32)).result()
    assert not reply.ok
    assert "have changed since" in reply.message
    missing = driver.runner.control(ReadAdapter(str(tmp_path / "none"), "0" * 32)).result()
    assert not missing.ok
    assert torch.equal(logprobs_with(driver, [0], Turn(1, TOKENS)), before)


def test_an_adapter_that_was_read_and_never_put_in_makes_room(base, drive, tmp_path: Path) -> None:
    driver = drive(base, kernels="auto")
    for seed in range(3):
        made = make_adapter(base, tmp_path / f"{seed}", base.modules(QV), seed=seed)
        uid = inspect_adapter(made.folder, base.config).uid
        assert driver.runner.control(ReadAdapter(str(made.folder), uid)).result().ok
    for seed in range(3):
        assert load(driver, base, 0, tmp_path / f"{seed}").ok
