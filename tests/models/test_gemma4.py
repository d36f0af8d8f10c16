"""What only Gemma 4 has: checkpoints with unused projections, and vectors where a token has no row
of the table of inputs for each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.driver import Driver, Turn, full_logprobs, ints, make_driver
from tests.models.many import GEMMA4_FAMILIES, VOCAB, make_checkpoint
from weft.config.model import ModelConfig
from weft.config.projections import projections
from weft.models.registry import make_model
from weft.ops.plain import PlainOps
from weft.plan.inputs import InputVectors

TOLERANCE = 2e-4  # of log probabilities, float32

Drive = Callable[..., Driver]


@pytest.fixture
def drive() -> Iterator[Drive]:
    drivers: list[Driver] = []

    def load(folder: Path, **settings: Any) -> Driver:
        drivers.append(make_driver(ModelConfig.from_folder(folder), folder, **settings))
        return drivers[-1]

    yield load
    for driver in drivers:
        driver.runner.close()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_vectors_have_the_inputs_for_each_layer_of_the_padding_token(
    drive: Drive, tmp_path: Path, kernels: str
) -> None:
    checkpoint = make_checkpoint("gemma4-small", tmp_path)
    tokens = prompt(1, 30)
    given = range(5, 12)  # places of vectors
    with torch.inference_mode():
        embedded = checkpoint.model.get_input_embeddings()(torch.tensor([tokens]))
        known = [0 if place in given else token for place, token in enumerate(tokens)]
        rows = checkpoint.model.model.get_per_layer_inputs(torch.tensor([known]))
        expected = checkpoint.model(inputs_embeds=embedded, per_layer_inputs=rows).logits[0, -1]
    driver = drive(checkpoint.folder, kernels=kernels)
    plan = driver.plan(Turn(0, known))
    vectors = InputVectors(index=ints(given), rows=embedded[0, given.start : given.stop].numpy())
    found = full_logprobs(driver.runner.launch(replace(plan, inputs=(vectors,))).result())[0]
    torch.testing.assert_close(found, expected.log_softmax(-1), atol=TOLERANCE, rtol=0)


def test_projections_that_no_layer_uses_are_left_out(drive: Drive, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("gemma4-small", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer in (4, 5):
        for name in ("k_proj", "v_proj", "k_norm"):
            earlier = f"model.layers.{layer - 2}.self_attn.{name}.weight"
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = tensors[earlier].clone()
    save_file(tensors, path)
    tokens = prompt(2, 20)
    logprobs = drive(tmp_path, kernels="torch").run(Turn(0, tokens))[0]
    expected = checkpoint.logits(tokens)[-1].log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", GEMMA4_FAMILIES)
def test_parameters_and_projections_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    config = ModelConfig.from_folder(make_checkpoint(name, tmp_path).folder)
    model = make_model(config, PlainOps(torch.float32, torch.device("meta")))
    shapes = {weight.name: weight.shape for weight in model.weights()}
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    assert matrices == config.num_parameters
    for projection, sizes in projections(config).items():
        if projection == "lm_head":
            continue  # the table of tokens
        shape = (sizes.out_size, sizes.in_size)
        if sizes.is_table:
            shape = shape[::-1]
        assert shapes[f"{projection}.weight"] == shape


@pytest.mark.parametrize("quantize", ["int4", "int8"])
@pytest.mark.parametrize("name", ["gemma4-small", "gemma4-moe"])
def test_kernels_in_few_bits_are_near_torch_in_the_same_bits(
    drive: Drive, tmp_path: Path, name: str, quantize: str
) -> None:
    folder = make_checkpoint(name, tmp_path).folder
    tokens = prompt(3, 40)
    found = []
    for kernels in ("torch", "auto"):
        driver = drive(folder, kernels=kernels, quantize=quantize)
        found.append(driver.run(Turn(0, tokens))[0].exp())
    assert (found[0] - found[1]).abs().sum() < 0.05
