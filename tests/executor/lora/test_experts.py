"""Adapters on experts: pairs for each expert, and pairs for all of them as peft writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.executor.driver import Turn
from tests.executor.lora.adapters import (
    Base,
    Made,
    load,
    logprobs_with,
    merged_logprobs,
    write_adapter,
)
from tests.models.many import make_checkpoint
from weft.assemble.adapters import AdapterFolder
from weft.config.engine import EngineConfig
from weft.config.projections import adapter_bytes
from weft.executor.lora.kinds.kind import AdapterError
from weft.executor.lora.read import inspect_adapter

TOKENS = [(7 * number + 3) % 120 + 5 for number in range(23)]
LAYER = "model.layers.{}.mlp"
RANK = 5
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 10}


@pytest.fixture
def base(base_of) -> Base:
    return base_of("qwen2moe")


def pair(out_size: int, in_size: int, seed: int, num: int = 1) -> tuple[Tensor, Tensor]:
    """A [num rank, in] and B [out, rank num]."""
    generator = torch.Generator().manual_seed(seed)
    a = 0.5 / in_size**0.5 * torch.randn(num * RANK, in_size, generator=generator)
    return a, 0.5 * torch.randn(out_size, num * RANK, generator=generator)


def written(name: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    prefix = f"base_model.model.{name}"
    return {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}


def for_each_expert(base: Base, folder: Path, seed: int = 0) -> Made:
    """Some experts alone, a matrix of the part that all tokens get, and another layer's."""
    tensors: dict[str, Tensor] = {}
    deltas: dict[str, Tensor] = {}
    weights = dict(base.model.named_parameters())
    for layer, expert in ((0, 0), (0, 3), (1, 5), (2, 2), (2, 3)):
        name = LAYER.format(layer)
        whole = {part: weights[f"{name}.experts.{part}"] for part in ("gate_up_proj", "down_proj")}
        for part in whole:
            deltas.setdefault(f"{name}.experts.{part}", torch.zeros_like(whole[part]))
        num_rows = whole["gate_up_proj"].shape[1] // 2
        for index, part in enumerate(("gate_proj", "up_proj", "down_proj")):
            if (expert, part) == (3, "up_proj"):
                continue
            of = whole["down_proj" if part == "down_proj" else "gate_up_proj"]
            begin, size = (0, of.shape[1]) if part == "down_proj" else (index * num_rows, num_rows)
            a, b = pair(size, of.shape[2], seed + 7 * expert + index)
            tensors |= written(f"{name}.experts.{expert}.{part}", a, b)
            stack = "down_proj" if part == "down_proj" else "gate_up_proj"
            deltas[f"{name}.experts.{stack}"][expert, begin : begin + size] += 2 * b @ a
    shared = f"{LAYER.format(1)}.shared_expert.up_proj"
    a, b = pair(*weights[f"{shared}.weight"].shape, seed=50 + seed)
    tensors |= written(shared, a, b)
    deltas[f"{shared}.weight"] = 2 * b @ a
    write_adapter(folder, tensors, CONFIG)
    return Made(folder, deltas)


def for_all_experts(base: Base, folder: Path) -> Made:
    """As peft names them: one module around the other, one for each tensor."""
    tensors: dict[str, Tensor] = {}
    deltas: dict[str, Tensor] = {}
    weights = dict(base.model.named_parameters())
    for layer in range(3):
        name = f"{LAYER.format(layer)}.experts"
        for part, beyond in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
            num, out_size, in_size = weights[f"{name}.{part}"].shape
            a, b = pair(out_size, in_size, 90 + layer, num)
            tensors |= written(f"{name}{beyond}", a, b)
            parts = (b.view(out_size, RANK, num), a.view(num, RANK, in_size))
            deltas[f"{name}.{part}"] = 2 * torch.einsum("ore,eri->eoi", *parts)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    write_adapter(folder, tensors, {**CONFIG, "target_parameters": targets})
    return Made(folder, deltas)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("make", [for_each_expert, for_all_experts])
def test_logits_are_those_of_merged_experts(
    base, drive, tmp_path: Path, kernels: str, make
) -> None:
    made = make(base, tmp_path / "adapter")
    driver = drive(base, kernels=kernels)
    assert load(driver, base, 0, made.folder).ok
    merged = merged_logprobs(base, made, TOKENS)
    plain = merged_logprobs(base, made._replace(deltas={}), TOKENS)
    assert (merged - plain).abs().max() > 0.05
    for begin, end in ((0, 12), (12, 22), (22, 23)):
        found = logprobs_with(driver, [0], Turn(0, TOKENS[begin:end]))
        torch.testing.assert_close(found[0], merged[end - 1], atol=2e-4, rtol=0)
    found = logprobs_with(driver, [-1], Turn(1, TOKENS))
    torch.testing.assert_close(found[0], plain[-1], atol=2e-4, rtol=0)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_experts_without_gates_have_pairs_of_two_matrices(
    drive, tmp_path: Path, kernels: str
) -> None:
    base = Base(*make_checkpoint("nemotron-h-moe", tmp_path / "model"))
    weights = dict(base.model.named_parameters())
    tensors: dict[str, Tensor] = {}
    deltas: dict[str, Tensor] = {}
    for layer in (0, 3):
        name = f"model.layers.{layer}.mixer.experts"
        for part in ("up_proj", "down_proj"):
            of_all = weights[f"{name}.{part}"]
            deltas[f"{name}.{part}"] = torch.zeros_like(of_all)
            for expert in (1, 4, 5, 6):
                a, b = pair(*of_all.shape[1:], seed=expert + layer)
                theirs = name.replace("model.", "backbone.")
                tensors |= written(f"{theirs}.{expert}.{part}", a, b)
                deltas[f"{name}.{part}"][expert] += 2 * b @ a
    write_adapter(tmp_path / "adapter", tensors, CONFIG)
    made = Made(tmp_path / "adapter", deltas)
    driver = drive(base, kernels=kernels)
    assert load(driver, base, 0, made.folder).ok
    merged = merged_logprobs(base, made, TOKENS)
    plain = merged_logprobs(base, made._replace(deltas={}), TOKENS)
    assert (merged - plain).abs().max() > 0.05
    for begin, end in ((0, 22), (22, 23)):
        found = logprobs_with(driver, [0], Turn(0, TOKENS[begin:end]))
        torch.testing.assert_close(found[0], merged[end - 1], atol=2e-4, rtol=0)


@pytest.mark.parametrize("quantize", ["", "int8", "bfloat16"])
def test_neighbours_with_other_experts_and_adapters_change_no_bit(
    base, drive, tmp_path: Path, quantize: str
) -> None:
    settings = {"dtype": "bfloat16"} if quantize == "bfloat16" else {"quantize": quantize}
    driver = drive(base, num_adapter_slots=2, kernels="auto", threads=2, **settings)
    for place, make in enumerate((for_each_expert, for_all_experts)):
        assert load(driver, base, place, make(base, tmp_path / str(place)).folder).ok
    texts = [[(5 * row + number) % 120 + 5 for number in range(7 + 4 * row)] for row in range(4)]
    places = [0, 1, -1, 1]
    together = logprobs_with(driver, places, *(Turn(row, text) for row, text in enumerate(texts)))
    for row, text in enumerate(texts):
        [alone] = logprobs_with(driver, places[row : row + 1], Turn(row + 4, text))
        assert torch.equal(alone, together[row]), row


def test_memory_for_experts_is_laid_out_where_settings_name_them(base, tmp_path: Path) -> None:
    made = for_all_experts(base, tmp_path / "adapter")
    assert inspect_adapter(made.folder, base.config).targets == ("experts",)
    small = adapter_bytes(base.config, 8, "all")
    assert small == adapter_bytes(base.config, 8)
    assert adapter_bytes(base.config, 8, "all,experts") > 2 * small
    for targets, said in (
        ("all", "the adapter changes 'experts'; all may be changed (--lora-target-modules)"),
        ("all,experts", ""),
    ):
        config = EngineConfig(lora_target_modules=targets, weights_root=str(tmp_path))
        folder = AdapterFolder(config, base.config, base.folder)
        if not said:
            assert folder.find("adapter").rank == RANK
            continue
        with pytest.raises(Exception, match="the adapter changes") as caught:
            folder.find("adapter")
        assert str(caught.value) == said


def test_tensors_of_all_experts_that_fit_none_are_refused(base, tmp_path: Path) -> None:
    name = f"{LAYER.format(0)}.experts"
    for tensors, said in (
        (written(name, *pair(47, 48, 1, 6)), "experts have 48 and 48 or 24 and 48"),
        (written(name, *pair(48, 48, 1, 5)), "is [25, 48] instead of [30, 48]"),
        (written(f"{name}.6.up_proj", *pair(24, 48, 1)), "the adapter changes model.layers.0"),
        (dict([*written(name, *pair(48, 48, 1, 6)).items()][:1]), "experts.lora_B.weight"),
    ):
        write_adapter(tmp_path, tensors, CONFIG)
        with pytest.raises(AdapterError) as caught:
            inspect_adapter(tmp_path, base.config)
        assert said in str(caught.value)
