"""Models with layers that keep a state: what a request gets does not depend on how its tokens are
cut into steps, on its neighbours, nor on whether its state is a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.executor.driver import Driver, Turn, ints, make_driver
from tests.models.many import STATE_FAMILIES, VOCAB, make_checkpoint
from weft.config.decoder import (
    DecoderSpec,
    GatedDeltaSpec,
    LayerSpec,
    MambaSpec,
    RowFactor,
    ShortConvSpec,
    TensorFactors,
)
from weft.config.model import FAMILIES, ModelConfig, UnsupportedModel
from weft.config.model_errors import BadConfig
from weft.config.projections import projections
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.models.layers.factors import with_factors
from weft.models.layers.linear import Linear
from weft.models.registry import make_model
from weft.ops.plain import PlainOps
from weft.plan.step import NO_STATE, Plan
from weft.weights.load import load_weights, unread_of

TOKENS = np.random.default_rng(4).integers(0, VOCAB, 90).tolist()
NAMES = ["lfm2", "qwen3.5", "qwen3-next", "granite4-mamba", "granite4-moe"]
NAMES += ["falcon-h1", "mamba2", "nemotron-h", "mamba"]  # attention beside states, or none
NAMES += ["minimax"]

Drive = Callable[..., Driver]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)).folder


@pytest.fixture
def drive() -> Iterator[Drive]:
    drivers: list[Driver] = []

    def load(folder: Path, **settings: Any) -> Driver:
        drivers.append(make_driver(ModelConfig.from_folder(folder), folder, **settings))
        return drivers[-1]

    yield load
    for driver in drivers:
        driver.runner.close()


def in_one_step(driver: Driver, row: int, tokens: list[int]) -> torch.Tensor:
    return driver.run(Turn(row, tokens))[0]


def in_chunks(driver: Driver, row: int, tokens: list[int], *sizes: int) -> torch.Tensor:
    begin = 0
    for size in sizes:
        driver.run(Turn(row, tokens[begin : begin + size]))
        begin += size
    return driver.run(Turn(row, tokens[begin:]))[0]


@pytest.mark.pairs
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernels_give_the_same_bits_however_a_prompt_is_cut(
    folder: Path, drive: Drive, quantize: str, threads: int
) -> None:
    driver = drive(folder, kernels="auto", quantize=quantize, threads=threads)
    whole = in_one_step(driver, 0, TOKENS)
    assert torch.equal(in_chunks(driver, 1, TOKENS, 1, 1, 1, 40, 2, 17), whole)
    assert torch.equal(in_chunks(driver, 2, TOKENS, *[1] * 30, 30, *[1] * 5), whole)
    # Beside others.
    turns = [Turn(3, TOKENS[:30]), Turn(4, TOKENS), Turn(5, TOKENS[5:])]
    assert torch.equal(driver.run(*turns)[1], whole)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_copies_on_the_way_and_those_who_go_on_from_them_are_the_sequence(
    folder: Path, drive: Drive, kernels: str
) -> None:
    driver = drive(folder, kernels=kernels)
    expected = in_one_step(driver, 0, TOKENS)
    early = driver.keep(1, 20)
    late = driver.keep(1, 33)
    at_end = driver.keep(1, 50)
    beside = driver.keep(2, 1)
    driver.run(Turn(1, TOKENS[:50]), Turn(2, TOKENS[:10]))
    driver.fork(1, 3, 20, early)
    driver.fork(1, 4, 33, late)
    driver.fork(1, 5, 33, late)
    driver.fork(1, 6, 50, at_end)
    driver.fork(2, 7, 1, beside)
    rest = [Turn(1, TOKENS[50:]), Turn(3, TOKENS[20:]), Turn(4, TOKENS[33:])]
    rest += [Turn(5, TOKENS[33:]), Turn(6, TOKENS[50:]), Turn(7, TOKENS[1:])]
    for found in driver.run(*rest):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        if kernels == "auto":
            assert torch.equal(found, expected)


def test_a_whole_step_of_the_kernels_reads_and_writes_the_same_states(
    folder: Path, drive: Drive
) -> None:
    driver = drive(folder, kernels="auto")
    if not isinstance(driver.runner.steps, CpuFusedSteps):
        pytest.skip("there are no kernels for this processor")
    expected = int(in_one_step(driver, 0, TOKENS).argmax())
    kept = driver.keep(1, 7)

    def token(*turns: Turn) -> int:
        plan = replace(driver.plan(*turns), outputs=())
        return int(driver.runner.launch(plan).result().tokens[-1])

    token(Turn(2, TOKENS[:5]), Turn(1, TOKENS[:40]))
    assert token(Turn(2, TOKENS[5:9]), Turn(1, TOKENS[40:])) == expected
    driver.fork(1, 3, 7, kept)
    for index in range(7, 30):
        token(Turn(3, TOKENS[index : index + 1]))
    assert token(Turn(3, TOKENS[30:])) == expected


def broken(plan: Plan, **changes: Any) -> Plan:
    assert plan.states is not None
    return replace(plan, outputs=(), states=replace(plan.states, **changes))


def test_slots_that_are_not_there_are_refused_before_anything_is_written(
    folder: Path, drive: Drive
) -> None:
    driver = drive(folder, kernels="auto")
    if not isinstance(driver.runner.steps, CpuFusedSteps):
        pytest.skip("there are no kernels for this processor")
    keep = {"kept_rows": ints([0]), "kept_lens": ints([3]), "kept_slots": ints([0])}
    for changes in (
        {"reads": ints([NO_STATE - 1])},
        {"reads": ints([1_000])},
        {"writes": ints([-1])},
        {"writes": ints([1_000])},
        {**keep, "kept_rows": ints([1])},
        {**keep, "kept_lens": ints([0])},
        {**keep, "kept_lens": ints([6])},
        {**keep, "kept_slots": ints([1_000])},
    ):
        plan = broken(driver.plan(Turn(0, TOKENS[:5])), **changes)
        with pytest.raises(AssertionError, match="contradicts itself"):
            driver.runner.launch(plan).result()


@pytest.mark.parametrize("name", STATE_FAMILIES)
def test_a_model_gives_the_weights_of_its_states_as_its_checkpoint_has_them(
    tmp_path: Path, name: str
) -> None:
    make_checkpoint(name, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    config = ModelConfig.from_folder(tmp_path)
    model = make_model(config, PlainOps(torch.float32, torch.device("cpu")))
    load_weights(model.weights(), tmp_path, unread_of(config))
    parts = (".conv.", ".linear_attn.", ".mamba.", ".mixer.", ".qkv_proj.", ".output_gate.")
    mixers = [one for one in model.weights() if any(part in one.name for part in parts)]
    assert mixers
    for weight in mixers:
        assert torch.equal(weight.get(), stored[weight.name])


def test_adapters_may_change_products_without_factors(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    model = make_model(config, PlainOps(torch.float32, torch.device("cpu")))
    with_rows = [weight.name for weight in model.weights() if weight.rows is not None]
    changeable = projections(config)
    changed = {f"{name}.weight" for name in changeable if not changeable[name].is_tied}
    assert changed <= set(with_rows)
    assert "model.layers.0.self_attn.k_proj" not in changeable
    multiplied = {one.name for one in config.decoder.factors}
    assert not any(name.split(".", 3)[-1] in multiplied for name in with_rows)


def test_factors_are_part_of_weights_in_eight_bits_too() -> None:
    ops = PlainOps(torch.float32, torch.device("cpu"))
    linear = Linear(2, {"a": 3}, True, ops)
    rows = (RowFactor(1, 0.5), RowFactor(0, 3.0))
    factors = [TensorFactors("a.weight", rows), TensorFactors("a.bias", (RowFactor(0, 2.0),))]
    weight, bias = with_factors(linear.weights("layer"), "layer", factors)
    weight.put(torch.full((3, 2), 10, dtype=torch.int8), scales=torch.tensor([1.0, 1.0, 0.2]))
    bias.put(torch.ones(3))
    assert linear.matrix.get(0)[:, 0].tolist() == pytest.approx([5, 30, 6])
    weight.put(torch.ones(2, 2), start=1)
    assert linear.matrix.get(0).tolist() == [[5, 5], [3, 3], [3, 3]]
    assert weight.get().tolist() == [[10, 10], [1, 1], [1, 1]]
    assert linear.matrix.get_bias(0).tolist() == [2, 2, 2]


def test_the_bytes_of_states_and_of_kv_are_those_of_the_layers_that_have_them(
    folder: Path,
) -> None:
    config = ModelConfig.from_folder(folder)
    layers = [config.decoder.layer(layer) for layer in range(config.num_layers)]
    states = [layer.state for layer in layers if layer.state is not None]
    of_one = 2 * config.num_kv_heads * config.head_dim * 4
    assert config.num_kv_layers == sum(layer.attends for layer in layers)
    assert config.kv_bytes_per_token == config.num_kv_layers * of_one
    assert config.state_bytes == 4 * sum(one.state_floats for one in states)
    assert not any(config.window(layer) for layer in range(config.num_layers))


def test_the_floats_of_a_state_are_those_of_its_past_inputs_and_matrices() -> None:
    assert ShortConvSpec(channels=2_048, taps=3).state_floats == 2 * 2_048
    delta = GatedDeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4)
    assert delta.channels == 2 * 16 * 128 + 32 * 128
    assert delta.state_floats == 32 * 128 * 128 + 3 * delta.channels
    mamba = MambaSpec(heads=48, groups=1, head_dim=64, state_dim=128, taps=4)
    assert mamba.channels == 48 * 64 + 2 * 128
    assert mamba.state_floats == 48 * 64 * 128 + 3 * mamba.channels


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "odd heads": ("qwen3.5", {"linear_value_head_dim": 20}, "linear_value_head_dim is 20"),
    "no groups": ("qwen3.5", {"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads"),
    "many taps": ("qwen3.5", {"linear_conv_kernel_dim": 5}, "2 to 4 are supported"),
    "one tap": ("lfm2", {"conv_L_cache": 1}, "conv_L_cache is 1"),
    "odd channels": ("lfm2", {"hidden_size": 72}, "hidden_size is 72"),
    "odd states": ("granite4-mamba", {"mamba_d_state": 20}, "mamba_d_state is 20"),
    "heads of another size": ("granite4-mamba", {"mamba_d_head": 32}, "mamba_d_head is 32; times"),
    "no groups of heads": ("granite4-mamba", {"mamba_n_groups": 3}, "multiple of mamba_n_groups"),
    "limited steps": (
        "granite4-mamba",
        {"time_step_limit": [0.0, 0.1]},
        "time_step_limit is .0.0, 0.1.; no limit is supported",
    ),
    "factors of other parts": ("falcon-h1", {"ssm_multipliers": [1.0] * 3}, "has 3 numbers; 5 are"),
    "a factor of nothing": ("falcon-h1", {"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers is 0"),
    "an unknown layer": ("nemotron-h", {"layers_block_type": ["conv"]}, "has a layer 'conv'"),
    "experts of latents": ("nemotron-h-moe", {"moe_latent_size": 32}, "moe_latent_size is 32"),
    "no layers": ("nemotron-h", {"layers_block_type": ["mlp"] * 1_025}, "has 1025 layers"),
    "one bias": ("falcon-h1", {"projectors_bias": True}, "projectors_bias is True"),
    "layers without end": ("mamba2", {"num_hidden_layers": 2**20}, "it must be at most 1,024"),
    "words without end": ("mamba2", {"vocab_size": 10**30}, "it must be at most 2,147,483,647"),
    "an eps of everything": ("mamba2", {"layer_norm_epsilon": 1e30}, "at least 0 and at most 1"),
    "a list in a list": ("lfm2", {"architectures": [[]]}, r"architecture \[\[\]\] is not"),
    "another mixer": ("lfm2", {"layer_types": ["mamba"] * 4}, "'mamba'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_states_that_are_not_computed_are_refused_by_name(tmp_path: Path, case: str) -> None:
    name, changes, message = REFUSED[case]
    kind, family = STATE_FAMILIES[name]
    shape = {**SHAPE_OF_FILES, "architectures": [f"{kind}ForCausalLM"], **family, **changes}
    with pytest.raises((UnsupportedModel, BadConfig), match=message):
        ModelConfig.from_hf(shape, "model")


def test_the_layers_of_a_file_that_does_not_name_them_follow_its_period() -> None:
    config = {**SHAPE_OF_FILES, "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 8}
    spec: DecoderSpec = ModelConfig.from_hf(config, "model").decoder
    assert [spec.layer(layer).state is None for layer in range(8)] == [False] * 3 + [True] + [
        False
    ] * 3 + [True]
    listed = {**SHAPE_OF_FILES, "architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [1, 3]}
    spec = ModelConfig.from_hf({**listed, "norm_eps": 1e-5}, "model").decoder
    assert [spec.layer(layer).state is None for layer in range(4)] == [False, True, False, True]


def test_a_mamba_needs_no_sizes_of_parts_that_it_lacks() -> None:
    absent = {"intermediate_size", "num_attention_heads", "num_key_value_heads"}
    absent |= {"max_position_embeddings", "rms_norm_eps", "norm_eps"}
    config = {key: value for key, value in SHAPE_OF_FILES.items() if key not in absent}
    _, sizes = STATE_FAMILIES["mamba2"]
    config |= {**sizes, "architectures": ["Mamba2ForCausalLM"]}
    model = ModelConfig.from_hf(config, "model")
    assert model.kv_bytes_per_token == model.num_kv_layers == 0
    assert model.last_storing_layer == 3
    mamba = MambaSpec(heads=8, groups=2, head_dim=16, state_dim=32, taps=4)
    assert model.decoder.layers == (LayerSpec(attends=False, state=mamba, mlp=None),)
    # The projections, and the embedding and the head.
    matrices = 4 * 64 * (mamba.in_size + mamba.out_size) + 2 * VOCAB * 64
    assert model.num_parameters == matrices


def test_a_nemotron_h_of_an_older_file_has_its_layers_in_one_word() -> None:
    _, sizes = STATE_FAMILIES["nemotron-h"]
    config = {**SHAPE_OF_FILES, **sizes, "architectures": ["NemotronHForCausalLM"]}
    listed = ModelConfig.from_hf(config, "model")
    del config["layers_block_type"]
    in_a_word = ModelConfig.from_hf({**config, "hybrid_override_pattern": "M-*-M"}, "model")
    assert listed == in_a_word
    assert listed.num_layers == 5
    assert [layer.attends for layer in listed.decoder.layers] == [False, False, True, False, False]


def test_an_lfm2_of_an_older_file_says_its_sizes_under_other_names() -> None:
    config = {
        **SHAPE_OF_FILES,
        "architectures": ["Lfm2ForCausalLM"],
        "norm_eps": 1e-5,
        "block_ff_dim": 12_288,
        "tie_embedding": False,
        "full_attn_idxs": [2],
    }
    del config["intermediate_size"]
    model = ModelConfig.from_hf(config, "model")
    assert not model.tie_embeddings
    mlp = model.decoder.layer(0).mlp
    assert mlp.size == 8_192
    assert "Lfm2ForCausalLM" in FAMILIES


SHAPE_OF_FILES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "dtype": "float32",
}
