"""Experts in checkpoints: a tensor for each, or one for all, in every order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.config.decoder import (
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    MoeSpec,
    RouterSpec,
    TensorNames,
)
from weft.config.model import BadCheckpoint, ModelConfig
from weft.config.quantized import Quantization
from weft.models.registry import DecoderModel, make_model
from weft.ops.plain import PlainOps
from weft.weights.load import load_weights, save_random
from weft.weights.packed.float4 import mxfp4_codes
from weft.weights.packed.sizes import coded_size
from weft.weights.safetensors import FileContent, TensorEntry

NUM_EXPERTS = 3
INNER = 5
HIDDEN = 8
MLP = "model.layers.0.mlp"


def config_of(
    names: ExpertNames,
    *,
    bias: bool = False,
    hidden: int = HIDDEN,
    inner: int = INNER,
) -> ModelConfig:
    experts = MoeSpec(
        router=RouterSpec(num_experts=NUM_EXPERTS, num_chosen=2),
        size=inner,
        bias=bias,
    )
    return ModelConfig(
        architecture="Qwen3MoeForCausalLM",
        name="test",
        vocab_size=16,
        hidden_size=hidden,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=hidden,
        intermediate_size=inner,
        max_position=64,
        norm_eps=1e-6,
        dtype="float32",
        tie_embeddings=True,
        decoder=DecoderSpec(
            layers=(LayerSpec(mlp=experts),),
            names=TensorNames(experts=names),
        ),
    )


def loaded(config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """The weights of a model that was loaded from the folder."""
    model = make_model(config, PlainOps(torch.float32, torch.device("cpu")))
    load_weights(model.weights(), folder)
    return contents(model)


def contents(model: DecoderModel) -> dict[str, Tensor]:
    return {weight.name: weight.get() for weight in model.weights()}


def apart(config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """A checkpoint with a tensor for each expert."""
    save_random(config, folder / "model.safetensors")
    return load_file(folder / "model.safetensors")


def of_each(tensors: Mapping[str, Tensor], name: str) -> list[Tensor]:
    return [tensors[f"{MLP}.experts.{expert}.{name}"] for expert in range(NUM_EXPERTS)]


def replaced(tensors: Mapping[str, Tensor], stacks: Mapping[str, Tensor], folder: Path) -> Path:
    """The checkpoint with these tensors in place of those of single experts."""
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stored = {f"{MLP}.experts.{name}": tensor.contiguous() for name, tensor in stacks.items()}
    save_file(kept | stored, folder / "model.safetensors")
    return folder


def test_experts_may_be_one_tensor_of_gates_ups_and_downs_each(tmp_path: Path) -> None:
    config = config_of(ExpertNames())
    tensors = apart(config, tmp_path)
    expected = loaded(config, tmp_path)
    stacks = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        stacks[f"{name}.weight"] = torch.stack(of_each(tensors, f"{name}.weight"))
    folder = replaced(tensors, stacks, tmp_path)
    torch.testing.assert_close(loaded(config, folder), expected, rtol=0, atol=0)


def gates_and_ups(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """[experts, inner, hidden] each"""
    gates = torch.stack(of_each(tensors, "gate_proj.weight"))
    return gates, torch.stack(of_each(tensors, "up_proj.weight"))


def test_gates_and_ups_of_all_experts_may_be_one_tensor(tmp_path: Path) -> None:
    config = config_of(ExpertNames())
    tensors = apart(config, tmp_path)
    expected = loaded(config, tmp_path)
    stacks = {
        "gate_up_proj": torch.cat(gates_and_ups(tensors), dim=1),
        "down_proj": torch.stack(of_each(tensors, "down_proj.weight")),
    }
    folder = replaced(tensors, stacks, tmp_path)
    torch.testing.assert_close(loaded(config, folder), expected, rtol=0, atol=0)


@pytest.mark.parametrize("alternate", [False, True])
def test_inputs_may_come_first_and_gates_and_ups_in_turns(tmp_path: Path, alternate: bool) -> None:
    plain = config_of(ExpertNames(), bias=True)
    tensors = apart(plain, tmp_path)
    expected = loaded(plain, tmp_path)
    names = ExpertNames(is_transposed=True, alternate=alternate)
    both = torch.stack(gates_and_ups(tensors), dim=2 if alternate else 1).flatten(1, 2)
    biases = [torch.stack(of_each(tensors, f"{name}.bias")) for name in ("gate_proj", "up_proj")]
    stacks = {
        "gate_up_proj": both.transpose(1, 2),
        "gate_up_proj_bias": torch.stack(biases, dim=2 if alternate else 1).flatten(1, 2),
        "down_proj": torch.stack(of_each(tensors, "down_proj.weight")).transpose(1, 2),
        "down_proj_bias": torch.stack(of_each(tensors, "down_proj.bias")),
    }
    found = loaded(config_of(names, bias=True), replaced(tensors, stacks, tmp_path))
    for expert in range(NUM_EXPERTS):
        whole = found[f"{MLP}.experts.{expert}.gate_up_proj"]
        gate, up = (whole[0::2], whole[1::2]) if alternate else whole.chunk(2)
        assert torch.equal(gate, expected[f"{MLP}.experts.{expert}.gate_proj.weight"])
        assert torch.equal(up, expected[f"{MLP}.experts.{expert}.up_proj.weight"])
        bias = found[f"{MLP}.experts.{expert}.gate_up_proj_bias"]
        gate_bias = bias[0::2] if alternate else bias[:INNER]
        assert torch.equal(gate_bias, expected[f"{MLP}.experts.{expert}.gate_proj.bias"])
        for name in ("down_proj.weight", "down_proj.bias"):
            whole_name = f"{MLP}.experts.{expert}.{name}"
            assert torch.equal(found[whole_name], expected[whole_name])


def test_blocks_of_gpt_oss_are_read_as_they_are_stored(tmp_path: Path) -> None:
    hidden = 64
    inner = 96
    names = ExpertNames(is_transposed=True, alternate=True)
    config = config_of(names, hidden=hidden, inner=inner)
    tensors = apart(config, tmp_path)
    generator = torch.Generator().manual_seed(3)
    expected = {}
    stacks = {}
    for name, num_rows, in_size in (
        ("gate_up_proj", 2 * inner, hidden),
        ("down_proj", hidden, inner),
    ):
        shape = (NUM_EXPERTS, num_rows, in_size // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
        stacks[f"{name}_blocks"] = blocks
        stacks[f"{name}_scales"] = scales
        expected[name] = [
            mxfp4_codes(*of_one).dequantized() for of_one in zip(blocks, scales, strict=True)
        ]
    found = loaded(config, replaced(tensors, stacks, tmp_path))
    for expert in range(NUM_EXPERTS):
        base = f"{MLP}.experts.{expert}"
        assert torch.equal(found[f"{base}.gate_up_proj"], expected["gate_up_proj"][expert])
        assert torch.equal(found[f"{base}.down_proj.weight"], expected["down_proj"][expert])
    assert (
        coded_size(
            {name: entry for name, entry in entries(tmp_path).items() if "proj" in name},
            Quantization("mxfp4", is_symmetric=True),
        ).num_weights
        == NUM_EXPERTS * 3 * hidden * inner
    )


def entries(folder: Path) -> Mapping[str, TensorEntry]:
    with FileContent(folder / "model.safetensors") as content:
        return content.entries


def test_a_tensor_of_all_experts_of_another_shape_is_refused(tmp_path: Path) -> None:
    config = config_of(ExpertNames())
    tensors = apart(config, tmp_path)
    stacks = {"gate_up_proj": torch.zeros(NUM_EXPERTS + 1, 2 * INNER, HIDDEN)}
    folder = replaced(tensors, stacks, tmp_path)
    with pytest.raises(BadCheckpoint, match=r"gate_up_proj \[4, 10, 8\] instead of \[3, 10, 8\]"):
        loaded(config, folder)


def test_parameters_count_all_experts_and_active_ones_the_chosen() -> None:
    config = config_of(ExpertNames())
    attention = 4 * HIDDEN * HIDDEN
    others = attention + 16 * HIDDEN + NUM_EXPERTS * HIDDEN
    assert config.num_parameters == others + NUM_EXPERTS * 3 * HIDDEN * INNER
    assert config.num_active_parameters == others + 2 * 3 * HIDDEN * INNER
    assert config.has_experts
    assert not replace(config, decoder=DecoderSpec()).has_experts
