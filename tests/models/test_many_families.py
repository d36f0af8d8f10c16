"""Every family gives what transformers gives: prompts, chunks, single tokens, greedy
continuations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.driver import Driver, Turn, make_driver
from tests.models.many import (
    FAMILIES,
    RENAMED,
    SEEING,
    VOCAB,
    Checkpoint,
    make_checkpoint,
    make_renamed,
    make_seeing,
)
from tests.seeds import one_in
from weft.config.model import ModelConfig
from weft.config.passes import own_passes
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.models.registry import make_model
from weft.ops.cpp.abi import NarrowArgs
from weft.ops.plain import PlainOps
from weft.weights.load import load_weights

TOLERANCE = 2e-4  # of log probabilities, float32
NUM_GREEDY = 3

Drive = Callable[..., Driver]


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


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


def assert_equal(actual: torch.Tensor, logits: torch.Tensor) -> None:
    torch.testing.assert_close(actual, logits.log_softmax(-1), atol=TOLERANCE, rtol=0)


def assert_the_same(driver: Driver, checkpoint: Checkpoint) -> None:
    tokens = prompt(1, 43)
    other = prompt(2, 40)
    # One prompt in chunks, beside another one that comes whole.
    begun = driver.run(Turn(0, tokens[:19]), Turn(1, other))
    assert_equal(begun[1], checkpoint.logits(other)[-1])
    # A single token between the chunks, and then those that are the likeliest.
    one = driver.run(Turn(0, tokens[19:20]))[0]
    ends = [driver.run(Turn(0, tokens[20:]))[0]]
    for _ in range(NUM_GREEDY):
        tokens.append(int(ends[-1].argmax()))
        ends.append(driver.run(Turn(0, tokens[-1:]))[0])
    expected = checkpoint.logits(tokens)
    assert_equal(torch.stack([begun[0], one, *ends]), expected[[18, 19, *range(42, len(tokens))]])
    assert tokens[43:] == expected[42:-1].argmax(-1).tolist()


def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoint: Checkpoint, drive: Drive
) -> None:
    assert_the_same(drive(checkpoint.folder, kernels="auto"), checkpoint)


@pytest.mark.parametrize("checkpoint", one_in(3, FAMILIES), indirect=True)
def test_torch_alone_gives_them_too(checkpoint: Checkpoint, drive: Drive) -> None:
    assert_the_same(drive(checkpoint.folder, kernels="torch"), checkpoint)


@pytest.mark.parametrize("checkpoint", one_in(6, FAMILIES), indirect=True)
def test_weights_in_eight_bits_choose_nearly_the_same_tokens(
    checkpoint: Checkpoint, drive: Drive
) -> None:
    driver = drive(checkpoint.folder, kernels="auto", quantize="int8")
    tokens = prompt(3, 70)
    driver.run(Turn(0, tokens[:20]))
    found = [driver.run(Turn(0, [token]))[0].argmax() for token in tokens[20:]]
    expected = checkpoint.logits(tokens)[20:].argmax(-1)
    same = (torch.stack(found) == expected).float().mean()
    assert same >= 0.88


def head_name(stored: Mapping[str, torch.Tensor]) -> str:
    return "lm_head.weight" if "lm_head.weight" in stored else "embed_out.weight"


@pytest.mark.parametrize(
    "checkpoint",
    [
        *("cwm", "olmo2", "gemma3", "cohere", "gpt-neox", "stablelm-parallel", "hyperclovax"),
        *("lfm2", "qwen3.5", "falcon-h1", "falcon-mamba", "nemotron-h", "youtu", "minicpm3"),
        *("hunyuan", "gemma4", "gemma4-small"),
    ],
    indirect=True,
)
def test_a_program_has_the_operations_that_the_passes_of_its_mechanisms_say(
    checkpoint: Checkpoint, drive: Drive
) -> None:
    driver = drive(checkpoint.folder, kernels="auto")
    steps = driver.runner.steps
    if not isinstance(steps, CpuFusedSteps):
        pytest.skip("there are no kernels for this processor")
    driver.run(Turn(0, [1, 2, 3]))
    program = steps._model.body.for_rows(1).program
    config = ModelConfig.from_folder(checkpoint.folder)
    passes = own_passes(config.decoder, config.num_layers, config.num_heads)
    counted = [args for args in program.args if not isinstance(args, NarrowArgs)]
    assert len(counted) == 1 + passes.others + passes.total  # 1: the embedding


@pytest.mark.parametrize("name", RENAMED)
def test_families_that_transformers_lacks_compute_what_they_are_made_of(
    drive: Drive, tmp_path: Path, name: str
) -> None:
    checkpoint = make_renamed(name, tmp_path)
    tokens = prompt(6, 40)
    expected = checkpoint.logits(tokens)
    for kernels in ("torch", "auto"):
        driver = drive(checkpoint.folder, kernels=kernels)
        assert_equal(driver.run(Turn(0, tokens[:33]))[0], expected[32])
        assert_equal(driver.run(Turn(0, tokens[33:]))[0], expected[39])


def test_a_gpt_neox_of_an_older_version_is_read(drive: Drive, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("gpt-neox", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rotation = config.pop("rope_parameters")
    config["rotary_pct"] = rotation["partial_rotary_factor"]
    config["rotary_emb_base"] = rotation["rope_theta"]
    path.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_out.weight"] = tensors.pop(head_name(tensors))
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = prompt(7, 20)
    driver = drive(tmp_path)
    assert_equal(driver.run(Turn(0, tokens))[0], checkpoint.logits(tokens)[-1])


@pytest.mark.parametrize(
    "checkpoint", ["gpt-neox", "phi", "phi3", "olmo", "stablelm", "lfm2-bias"], indirect=True
)
def test_a_model_gives_its_weights_as_its_checkpoint_has_them(checkpoint: Checkpoint) -> None:
    stored = load_file(checkpoint.folder / "model.safetensors")
    config = ModelConfig.from_folder(checkpoint.folder)
    model = make_model(config, PlainOps(torch.float32, torch.device("cpu")))
    load_weights(model.weights(), checkpoint.folder)
    for weight in model.weights():
        content = stored[weight.name.replace("lm_head.weight", head_name(stored))]
        assert torch.equal(weight.get(), content)
        if content.dim() == 2:
            assert torch.equal(weight.get(64, len(content)), content[64:])


@pytest.mark.parametrize("name", SEEING)
def test_the_text_part_of_a_model_that_sees_is_served(
    drive: Drive, tmp_path: Path, name: str
) -> None:
    checkpoint = make_seeing(name, tmp_path)
    tokens = prompt(5, 40)
    expected = checkpoint.logits(tokens)
    for kernels in ("torch", "auto"):
        driver = drive(checkpoint.folder, kernels=kernels)
        assert_equal(driver.run(Turn(0, tokens[:33]))[0], expected[32])
        assert_equal(driver.run(Turn(0, tokens[33:]))[0], expected[39])
