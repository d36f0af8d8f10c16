"""The likeliest tokens of a screened head are those of the whole head, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import weft.executor.cpu.screened_head as screened
from tests.executor.checkpoints import checkpoint, write
from tests.executor.driver import Driver, Turn, asking, make_driver
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.executor.cpu.screened_head import HeadCopy, screenable
from weft.ops.cpp import abi
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.protocol import Norm
from weft.plan.device import UpdateFromDisk

pytestmark = pytest.mark.pairs

INF = float("inf")
NAN = float("nan")
CAPACITY = 70
FORMATS = pytest.mark.parametrize(
    "format", [WeightFormat.F32, WeightFormat.BF16], ids=["f32", "bf16"]
)


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screened, "MIN_WEIGHTS", 0)


class Heads:
    """A head, whole and screened."""

    def __init__(self, library: Library, format: WeightFormat, weight: Tensor) -> None:
        self._library = library
        vocab_size, in_size = weight.shape
        ops = CppOps(library, format)
        matrix = ops.matrix(in_size, (vocab_size,), precise=True)
        matrix.put(0, weight)
        ops.begin(CAPACITY)
        self._x = ops.recorder.buffer(in_size)
        norm = Norm(torch.linspace(0.5, 1.5, in_size), 1e-6)
        logits = ops.logits(ops.norm(self._x, norm), matrix)
        program = ops.finish()
        self.tokens = torch.zeros(CAPACITY, dtype=torch.int64)
        self.peaks = torch.zeros(CAPACITY)
        argmax = abi.ArgmaxArgs(
            logits.data_ptr(),
            vocab_size,
            logits.stride(0),
            self.tokens.data_ptr(),
            self.peaks.data_ptr(),
        )
        exact = screenable(program)
        assert exact is not None
        self.copy = HeadCopy(library, exact)
        self.copy.fill()
        self._whole = program.then(argmax)
        self._screened = self.copy.program(exact, argmax)
        self._keep = (logits, norm, matrix)

    def _run(self, program: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        self._x[: len(x)] = x
        program.run(self._library, abi.StepArgs(num_tokens=len(x)))
        return self.tokens[: len(x)].clone(), self.peaks[: len(x)].clone()

    def assert_same(self, x: Tensor) -> Tensor:
        """Returns the tokens."""
        tokens, peaks = self._run(self._whole, x)
        self.tokens.fill_(-5)
        screened_tokens, screened_peaks = self._run(self._screened, x)
        assert screened_tokens.tolist() == tokens.tolist()
        assert screened_peaks.view(torch.int32).tolist() == peaks.view(torch.int32).tolist()
        return tokens


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@FORMATS
@pytest.mark.parametrize(("vocab_size", "in_size"), [(1_000, 96), (33, 64), (2_500, 320), (7, 40)])
def test_random_heads(
    kernels: Library, format: WeightFormat, vocab_size: int, in_size: int
) -> None:
    heads = Heads(kernels, format, random(vocab_size, in_size))
    assert heads.copy.is_sound
    for num_rows in (1, 2, 3, 4, 5, 17, 64, 65):
        heads.assert_same(3 * random(num_rows, in_size, seed=num_rows))


@FORMATS
def test_tokens_that_the_copy_cannot_tell_apart(kernels: Library, format: WeightFormat) -> None:
    """Their rows differ by less than a step of eight bits, and some not at all."""
    weight = 0.05 * random(900, 128)
    weight[:, ::32] *= 20  # a wide range, and so wide steps
    weight[5] = random(128, seed=4)
    weight[300:700] = weight[5] + 0.002 * random(400, 128, seed=1)
    weight[800] = weight[350]
    heads = Heads(kernels, format, weight)
    x = weight[5] + random(60, 128, seed=2)
    found: set[int] = set()
    for first in range(0, 60, 2):
        found.update(heads.assert_same(x[first : first + 2]).tolist())
    assert len(found) > 5
    heads.assert_same(x)


@FORMATS
def test_equal_logits_give_the_first_token(kernels: Library, format: WeightFormat) -> None:
    weight = random(400, 64)
    weight[250] = weight[77] = weight[311] = 4 * random(64, seed=3)
    heads = Heads(kernels, format, weight)
    norm = torch.linspace(0.5, 1.5, 64)
    assert heads.assert_same(weight[[77]] / norm).tolist() == [77]
    assert Heads(kernels, format, torch.zeros(400, 64)).assert_same(random(2, 64)).tolist() == [
        0,
        0,
    ]


@FORMATS
@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0, 1e-30, 1e30, 3e38])
def test_inputs_that_say_nothing(kernels: Library, format: WeightFormat, value: float) -> None:
    heads = Heads(kernels, format, random(500, 64))
    x = random(2, 64, seed=5)
    x[1, 10] = value
    heads.assert_same(x)
    x[1] = value
    heads.assert_same(x)


@FORMATS
def test_only_few_exact_logits_are_computed(kernels: Library, format: WeightFormat) -> None:
    """The others keep the value of the copy."""
    heads = Heads(kernels, format, random(2_000, 256))
    logits = heads._keep[0]
    x = 3 * random(1, 256, seed=7)
    heads._run(heads._whole, x)
    exact = logits[0].clone()
    heads._run(heads._screened, x)
    num_exact = int((logits[0] == exact).sum())
    assert 0 < num_exact < 800


def test_weights_that_are_not_finite_are_not_screened(kernels: Library) -> None:
    weight = random(100, 64)
    weight[3, 3] = NAN
    assert not Heads(kernels, WeightFormat.F32, weight).copy.is_sound


def test_a_head_in_few_bits_or_with_more_than_a_product_is_left_alone(
    library: Callable[[str], Library],
) -> None:
    def head(format: WeightFormat, **how: Any) -> object:
        ops = CppOps(library(""), format)
        matrix = ops.matrix(64, (100,), precise=True)
        matrix.put(0, random(100, 64))
        ops.begin(4)
        ops.logits(ops.recorder.buffer(64), matrix, **how)
        return screenable(ops.finish())

    assert head(WeightFormat.BF16) is not None
    assert head(WeightFormat.I8) is None
    assert head(WeightFormat.F32, cap=30.0) is None
    assert head(WeightFormat.F32, scale=0.5) is None


def fused_of(driver: Driver) -> CpuFusedSteps:
    return cast(CpuFusedSteps, driver.runner.steps)


def test_steps_screen_and_new_weights_are_copied(tmp_path: Path) -> None:
    def chosen(driver: Driver) -> list[int]:
        driver.slots.clear()
        found = []
        for length in range(1, 9):
            plan = asking(driver.plan(Turn(length % 4, list(range(1, 5 + length)))))
            found += driver.runner.launch(plan).result().tokens.tolist()
        return found

    write(tmp_path / "new", checkpoint(1.5))
    driver = make_driver(folder=write(tmp_path / "old", checkpoint()), kernels="auto")
    steps = fused_of(driver)
    assert steps.tensors
    before = chosen(driver)
    assert [type(args) for args in steps._head.likeliest.args] == [abi.ScreenedHeadArgs]
    assert driver.runner.control(UpdateFromDisk("new")).result().ok
    after = chosen(driver)
    assert driver.runner.control(UpdateFromDisk("old")).result().ok
    assert chosen(driver) == before
    driver.runner.close()

    fresh = make_driver(folder=tmp_path / "new", kernels="auto")
    steps = fused_of(fresh)
    steps._copy = None
    assert chosen(fresh) == after
    assert steps._head.likeliest is steps._head.greedy
    fresh.runner.close()
