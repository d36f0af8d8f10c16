"""Adapters on embeddings and heads: for whatever of a step the head is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.executor.driver import Turn, ints, make_driver
from tests.executor.lora.adapters import (
    ENDS,
    QV,
    load,
    make_adapter,
    merged_logprobs,
    write_adapter,
)
from tests.models.pooled import VOCAB, make_pooled
from tests.models.pooled import run as pooled
from weft.config.model import ModelConfig
from weft.executor.lora.read import inspect_adapter
from weft.plan.device import LoadAdapter
from weft.plan.outputs import PromptLogprobs, PromptLogprobsRequest
from weft.plan.step import find

TOKENS = [(7 * number + 3) % 120 + 5 for number in range(23)]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_log_probabilities_of_a_prompt_are_those_of_its_adapter(
    base, drive, tmp_path: Path, kernels: str
) -> None:
    made = make_adapter(base, tmp_path / "ends", ENDS)
    driver = drive(base, kernels=kernels)
    assert load(driver, base, 0, made.folder).ok
    num = len(TOKENS)
    # Behind the tokens of a request without an adapter, of which only the sampled one is asked for.
    places = range(5, 5 + num - 1)
    wanted = PromptLogprobsRequest(
        index=ints([1]),
        counts=ints([num - 1]),
        num_top=ints([0]),
        ids=np.empty((1, 0), np.int32),
        places=ints(places),
        targets=ints(TOKENS[1:]),
    )
    plan = driver.plan(Turn(0, TOKENS[:5]), Turn(1, TOKENS))
    plan = replace(plan, outputs=(*plan.outputs, wanted), adapters=ints([-1, 0]))
    told = find(driver.runner.launch(plan).result().outputs, PromptLogprobs)
    assert told is not None
    expected = merged_logprobs(base, made, TOKENS)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])
    np.testing.assert_allclose(told.logprobs, expected[:, 0], atol=2e-4)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_an_adapter_of_a_classifier_brings_its_labels(tmp_path: Path, kernels: str) -> None:
    reference = make_pooled("qwen3-labels", tmp_path / "model")
    config = ModelConfig.from_folder(reference.folder)
    generator = torch.Generator().manual_seed(3)
    tokens = [7 * number % VOCAB for number in range(23)]
    labels = 0.3 * torch.randn(4, config.hidden_size, generator=generator)
    weight = dict(reference.model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    a = 0.1 * torch.randn(3, weight.shape[1], generator=generator)
    b = 0.3 * torch.randn(weight.shape[0], 3, generator=generator)
    up = "base_model.model.model.layers.1.mlp.up_proj"
    tensors = {
        "base_model.model.score.weight": labels,
        f"{up}.lora_A.weight": a,
        f"{up}.lora_B.weight": b,
    }
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6}
    write_adapter(tmp_path / "a", tensors, {**settings, "modules_to_save": ["classifier", "score"]})
    driver = make_driver(
        config, reference.folder, max_loaded_loras=1, max_lora_rank=64, kernels=kernels
    )
    try:
        info = inspect_adapter(tmp_path / "a", config)
        assert info.targets == ("score", "up_proj")
        request = LoadAdapter(0, str(tmp_path / "a"), info.uid)
        reply = driver.runner.control(request).result()
        assert reply.ok, reply.message
        before = reference.vector(tokens)
        plan = driver.plan
        driver.plan = lambda *turns: replace(plan(*turns), adapters=ints([0, -1]))  # type: ignore
        own, without = pooled(driver, Turn(0, tokens), Turn(1, tokens))
        with torch.no_grad():
            reference.model.score.weight.copy_(labels)
            weight += 2 * b @ a
        np.testing.assert_allclose(own, reference.vector(tokens), atol=2e-4)
        np.testing.assert_allclose(without, before, atol=2e-4)
    finally:
        driver.runner.close()


def test_an_adapter_without_a_head_behind_one_with_it_leaves_the_head(
    base, drive, tmp_path: Path
) -> None:
    driver = drive(base, kernels="auto")
    ends = make_adapter(base, tmp_path / "ends", ENDS, seed=1)
    other = make_adapter(base, tmp_path / "other", base.modules(QV), seed=2)
    assert load(driver, base, 0, ends.folder).ok
    assert load(driver, base, 0, other.folder).ok
    plan = replace(driver.plan(Turn(0, TOKENS)), adapters=ints([0]), outputs=())
    expected = merged_logprobs(base, other, TOKENS)[-1].argmax()
    assert driver.runner.launch(plan).result().tokens.tolist() == [int(expected)]
