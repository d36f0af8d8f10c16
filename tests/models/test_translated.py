"""The code of transformers in the words of our kernels: which models are computed by one program,
what torch computes between programs, and that weights which change are seen by both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from tests.executor.driver import Driver, Turn, make_driver
from tests.models import by_library, many
from tests.seeds import every_second
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.executor.cpu.segmented_model import SegmentedModel
from weft.models.transformers_backend.describe import described
from weft.models.transformers_backend.model import TransformersModel
from weft.models.transformers_backend.translate.graph import (
    Graph,
    Leaves,
    Length,
    Untranslatable,
    written_down,
)
from weft.models.transformers_backend.translate.meaning import Activation, RmsNormed, Sum
from weft.models.transformers_backend.translate.recognise import Recogniser
from weft.ops.cpp.library import Unavailable, load

# By what they say: fused and permuted projections, scales, caps, norms before and behind, rotation
# of a part of each head and of pairs side by side, layer norms, no gate.
WHOLE = ("phi3", "granite", "gemma2", "olmo2", "glm4", "gpt-neox", "stablelm", "nemotron")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    try:
        load("")
    except Unavailable as exc:
        pytest.skip(f"our kernels cannot be had: {exc}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = driver_of("gemma2", tmp_path_factory.mktemp("gemma2"))
    yield driver
    driver.runner.close()


def driver_of(name: str, folder: Path) -> Driver:
    if name in many.FAMILIES:
        many.make_checkpoint(name, folder)
    else:
        by_library.make_by_library(name, folder)
    return make_driver(described(folder, "tiny"), folder, kernels="auto")


@pytest.mark.parametrize("name", every_second(WHOLE))
def test_code_that_says_nothing_new_is_one_call_of_the_kernels(name: str, folder: Path) -> None:
    driver = driver_of(name, folder)
    assert isinstance(driver.runner.steps, CpuFusedSteps)
    driver.runner.close()


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "hunyuan"])
def test_what_only_a_model_does_is_computed_by_torch_between_programs(
    name: str, folder: Path
) -> None:
    driver = driver_of(name, folder)
    assert isinstance(driver.steps._model, SegmentedModel)
    driver.runner.close()


def test_code_that_looks_at_values_runs_as_it_is(folder: Path) -> None:
    driver = driver_of("jetmoe", folder)
    assert isinstance(driver.steps._model, TransformersModel)
    assert driver.steps._model.untranslated
    driver.runner.close()


def test_answers_do_not_depend_on_the_requests_beside_them(gemma2: Driver) -> None:
    prompt = list(range(3, 40))
    alone = gemma2.run(Turn(0, prompt))
    gemma2.run(Turn(1, prompt[:20], samples=False), Turn(2, prompt[5:30]))
    together = gemma2.run(Turn(1, prompt[20:]), Turn(3, prompt[7:9]))
    assert torch.equal(alone[0], together[0])


def test_a_norm_that_adds_one_to_its_weight_sees_the_weight_change(gemma2: Driver) -> None:
    store = gemma2.runner.store
    before = gemma2.run(Turn(4, [5, 6, 7]))
    weight = store._weights["model.norm.weight"]
    kept = weight.get()
    weight.put(kept + 0.5)
    assert not torch.allclose(gemma2.run(Turn(5, [5, 6, 7])), before)
    weight.put(kept)
    assert torch.equal(gemma2.run(Turn(6, [5, 6, 7])), before)


class Scene(nn.Module):
    """Code as models have it, on rows of 8 numbers."""

    def __init__(self, code: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8), requires_grad=False)
        self.one = nn.Linear(8, 8)
        self._code = code

    def graph(self) -> Graph:
        def run(num_tokens: int) -> Any:
            x = torch.zeros(1, num_tokens, 8)
            positions = torch.zeros(1, num_tokens, dtype=torch.long)
            return (x, positions), lambda: self._code(self, x)

        return written_down(run, self, Leaves({"one": self.one}, {}, {}))


def recognised(code: Any) -> Recogniser:
    recogniser = Recogniser(Scene(code).graph(), 16)
    recogniser.recognise()
    return recogniser


def meaning_of_output(code: Any) -> object:
    recogniser = recognised(code)
    return recogniser.meanings.get(recogniser.graph.output)


def test_sizes_that_follow_the_number_of_tokens_are_told_from_others() -> None:
    graph = Scene(lambda _, x: x.view(-1, 4)).graph()
    assert graph.output.shape == (Length(2, 0), 4)


def test_a_norm_is_known_by_its_operations() -> None:
    def norm(scene: Scene, x: Tensor) -> Tensor:
        return scene.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    def other(scene: Scene, x: Tensor) -> Tensor:
        return scene.weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5))

    assert isinstance(meaning_of_output(norm), RmsNormed)
    assert meaning_of_output(other) is None


@pytest.mark.parametrize("is_known", [True, False])
def test_an_activation_is_known_by_what_it_makes_of_numbers(is_known: bool) -> None:
    def squared(scene: Scene, x: Tensor) -> Tensor:
        y = torch.relu(scene.one(x))
        return y * y if is_known else y * y * y

    assert isinstance(meaning_of_output(squared), Activation) == is_known


def test_memory_that_is_written_to_is_torchs_own() -> None:
    def written(_: Scene, x: Tensor) -> Tensor:
        y = x + x
        z = x + y
        z[..., :4] = 0.0
        return z + y

    recogniser = recognised(written)
    found = [node for node, what in recogniser.meanings.items() if isinstance(what, Sum)]
    assert len(found) == 2  # the first and the last
    assert not any(node.is_written for node in found)


def test_values_that_decide_what_is_done_cannot_be_written_down() -> None:
    def branching(scene: Scene, x: Tensor) -> Tensor:
        return scene.one(x) if bool((x > 0).any()) else x

    with pytest.raises(DataDependentOutputException):
        Scene(branching).graph()


def test_what_depends_on_the_number_of_tokens_cannot_be_written_down() -> None:
    def longer(_: Scene, x: Tensor) -> Tensor:
        return x if x.shape[1] > 20 else x + 1

    with pytest.raises(Untranslatable, match="depends on the number of tokens"):
        Scene(longer).graph()
