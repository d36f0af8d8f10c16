"""How many tokens each expert gets, counted while steps run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.executor.driver import Driver, Turn, make_driver, piece_of
from tests.models.many import Checkpoint, make_checkpoint
from weft.config.model import ModelConfig
from weft.plan.device import DeviceReply, RecordExperts

NUM_CHOSEN = 3
LAYERS = (3,)  # of "qwen3-moe-sparse" that have experts
FIRST = list(range(40, 60))
SECOND = list(range(100, 107))

Drive = Callable[..., Driver]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("qwen3-moe-sparse", tmp_path_factory.mktemp("experts"))


@pytest.fixture
def drive(checkpoint: Checkpoint) -> Iterator[Drive]:
    drivers: list[Driver] = []

    def load(**settings: Any) -> Driver:
        folder = checkpoint.folder
        drivers.append(make_driver(ModelConfig.from_folder(folder), folder, **settings))
        return drivers[-1]

    yield load
    for driver in drivers:
        driver.runner.close()


def ask(driver: Driver, action: str) -> DeviceReply:
    return driver.runner.control(RecordExperts(action)).result()


def counts(reply: DeviceReply) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[prefill and decode, layers, experts]"""
    assert reply.ok, reply.message
    return np.frombuffer(reply.values, np.int64).reshape(reply.shape)


def chosen_by_transformers(checkpoint: Checkpoint, layer: int, tokens: list[int]) -> torch.Tensor:
    """[tokens, k]"""
    outputs: list[torch.Tensor] = []

    def keep(module: object, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        outputs.append(output[2])

    hook = checkpoint.model.model.layers[layer].mlp.gate.register_forward_hook(keep)
    with torch.inference_mode():
        checkpoint.model(input_ids=torch.tensor([tokens]))
    hook.remove()
    return outputs[0].view(len(tokens), NUM_CHOSEN)


def expected(checkpoint: Checkpoint, tokens: list[int], start: int, end: int) -> list[list[int]]:
    """What routers of transformers choose for some tokens: [layers, experts]."""
    found = []
    for layer in LAYERS:
        experts = chosen_by_transformers(checkpoint, layer, tokens)[start:end]
        found.append(torch.bincount(experts.flatten(), minlength=8).tolist())
    return found


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_counts_are_the_choices_of_transformers(
    checkpoint: Checkpoint, drive: Drive, kernels: str
) -> None:
    driver = drive(kernels=kernels)
    driver.run(Turn(0, FIRST[:5]))  # before the start: not counted
    assert ask(driver, "start").ok
    driver.run(Turn(0, FIRST[5:18]))
    driver.run(Turn(0, FIRST[18:19]))
    driver.run(Turn(0, FIRST[19:20]), Turn(1, SECOND))
    reply = ask(driver, "dump")
    prefill, decode = counts(reply)
    assert reply.layers == LAYERS
    first = np.array(expected(checkpoint, FIRST, 5, 18))
    second = np.array(expected(checkpoint, SECOND, 0, 7))
    assert prefill.tolist() == (first + second).tolist()
    assert decode.tolist() == expected(checkpoint, FIRST, 18, 20)
    assert prefill.sum(axis=1).tolist() == [NUM_CHOSEN * 20]


def test_a_dump_begins_again_and_a_stop_keeps_what_was_counted(drive: Drive) -> None:
    driver = drive(kernels="auto")
    assert ask(driver, "start").ok
    driver.run(Turn(0, FIRST))
    assert counts(ask(driver, "dump")).sum() == NUM_CHOSEN * len(FIRST)
    driver.run(Turn(1, SECOND))
    assert ask(driver, "stop").ok
    driver.run(Turn(2, FIRST))
    assert counts(ask(driver, "dump")).sum() == NUM_CHOSEN * len(SECOND)
    assert counts(ask(driver, "dump")).sum() == 0


def test_a_look_keeps_what_was_counted_and_says_whether_more_is(
    drive: Drive, tmp_path: Path
) -> None:
    driver = drive(kernels="auto", profile_dir=str(tmp_path))
    assert counts(ask(driver, "look")).sum() == 0
    assert ask(driver, "start").ok
    driver.run(Turn(0, FIRST))
    looks = [ask(driver, "look") for _ in range(2)]
    assert [counts(one).sum() for one in looks] == [NUM_CHOSEN * len(FIRST)] * 2
    assert [one.is_recording for one in looks] == [True, True]
    assert ask(driver, "stop").ok
    assert not ask(driver, "look").is_recording
    assert not list(tmp_path.iterdir())
    assert counts(ask(driver, "dump")).sum() == NUM_CHOSEN * len(FIRST)


def test_starting_twice_and_stopping_without_a_start_are_refused(drive: Drive) -> None:
    driver = drive(kernels="auto")
    refused = ask(driver, "stop")
    assert (refused.ok, refused.status) == (False, 400)
    assert "is not being recorded" in refused.message
    assert ask(driver, "start").ok
    assert "being recorded already" in ask(driver, "start").message
    assert ask(driver, "stop").ok


def test_each_dump_is_a_new_file_in_the_folder(drive: Drive, tmp_path: Path) -> None:
    driver = drive(kernels="auto", profile_dir=str(tmp_path / "new"))
    assert ask(driver, "start").ok
    driver.run(Turn(0, FIRST))
    assert ask(driver, "dump").file == "expert-distribution-0001.json"
    assert ask(driver, "dump").file == "expert-distribution-0002.json"
    told = json.loads((tmp_path / "new" / "expert-distribution-0001.json").read_text())
    assert told["layers"] == list(LAYERS)
    assert sum(told["decode"][0]) + sum(told["prefill"][0]) == NUM_CHOSEN * len(FIRST)


def test_a_model_without_experts_refuses_by_its_name() -> None:
    driver = make_driver()
    try:
        for action in ("start", "stop", "look", "dump"):
            reply = ask(driver, action)
            assert (reply.ok, reply.status) == (False, 400)
            assert reply.message == "smallest has no experts"
    finally:
        driver.runner.close()


def test_a_prefill_in_pieces_is_counted_once_in_each_layer(
    checkpoint: Checkpoint, drive: Drive
) -> None:
    found = []
    for layers in (0, 2):
        driver = drive(kernels="auto", split_prefill_layers=layers)
        assert ask(driver, "start").ok
        plan = driver.plan(Turn(0, FIRST))
        if layers:
            for first in (0, 2):
                driver.runner.launch(piece_of(plan, first, first + 2, num_layers=4)).result()
        else:
            driver.runner.launch(plan).result()
        found.append(counts(ask(driver, "dump")))
    assert (found[0] == found[1]).all()
    assert found[0].sum() == len(FIRST) * NUM_CHOSEN
