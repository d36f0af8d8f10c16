from __future__ import annotations

from dataclasses import replace

import pytest

from tests.config.machines import MODEL, machine
from weft.config.amounts import GB
from weft.config.decoder import DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RouterSpec, TensorNames
from weft.config.encoder_spec import EncoderSpec
from weft.config.engine import EngineConfig
from weft.config.machine import GpuCard
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.projections import Projection, adapter_bytes, projections
from weft.config.resolve import resolve


def of_layer_0(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each."""
    prefix = "model.layers.0."
    found = {}
    for name, one in projections(model).items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = (one.in_size, one.out_size)
    return found


def made_of(**layer: object) -> ModelConfig:
    return replace(MODEL, decoder=DecoderSpec(layers=(LayerSpec(**layer),)))  # type: ignore[arg-type]


def test_projections_have_the_names_and_sizes_of_checkpoints() -> None:
    assert of_layer_0(MODEL) == {
        "self_attn.q_proj": (100, 100),
        "self_attn.k_proj": (100, 10),
        "self_attn.v_proj": (100, 10),
        "self_attn.o_proj": (100, 100),
        "mlp.gate_proj": (100, 400),
        "mlp.up_proj": (100, 400),
        "mlp.down_proj": (400, 100),
    }
    assert len(projections(MODEL)) == 7 * MODEL.num_layers + 2
    table = Projection(MODEL.vocab_size, 100, is_table=True)
    assert projections(MODEL)["model.embed_tokens"] == table
    assert projections(MODEL)["lm_head"] == Projection(100, MODEL.vocab_size)


def test_one_tensor_of_several_parts_is_one_projection() -> None:
    names = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
    found = of_layer_0(replace(MODEL, decoder=DecoderSpec(names=names)))
    assert found["self_attn.qkv_proj"] == (100, 120)
    assert found["mlp.gate_up_proj"] == (100, 800)


def test_experts_have_theirs_and_so_has_what_all_tokens_get() -> None:
    experts = MoeSpec(router=RouterSpec(num_experts=4, num_chosen=2), size=50, shared_size=60)
    found = of_layer_0(made_of(mlp=experts))
    assert found["mlp.experts.3.gate_proj"] == (100, 50)
    assert found["mlp.experts.0.down_proj"] == (50, 100)
    assert found["mlp.shared_experts.up_proj"] == (100, 60)
    assert len(found) == 4 + 3 * 4 + 3
    up = projections(made_of(mlp=experts))["model.layers.0.mlp.experts.3.up_proj"]
    assert up.stack == ("model.layers.0.mlp.experts.gate_up_proj", 3, 4, 50, 100)
    assert set(of_layer_0(made_of(mlp=MlpSpec(is_gated=False)))) & {"mlp.gate_proj"} == set()


def test_other_models_have_none() -> None:
    assert projections(replace(MODEL, encoder=EncoderSpec())) == {}
    assert projections(replace(MODEL, library_config="{}")) == {}


def test_memory_for_adapters_is_taken_from_that_of_the_kv_cache() -> None:
    # 16 ranks for 1,850 inputs and outputs in 25 layers, which are filled up to blocks.
    least = 16 * 25 * (5 * 100 + 2 * 100 + 400 + 100 + 20 + 400 + 400 + 100) * 2
    layers = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    assert least < adapter_bytes(MODEL, 9, layers) < 1.5 * least
    assert adapter_bytes(MODEL, 16, "q_proj") == 16 * 25 * (128 + 128) * 2
    ends = adapter_bytes(MODEL, 16, "embed_tokens, lm_head")
    assert ends == adapter_bytes(MODEL, 16) - adapter_bytes(MODEL, 16, layers)
    assert ends > 16 * 2 * 2 * (MODEL.vocab_size + 100)
    asked = {"enable_lora": True, "max_loaded_loras": 100, "max_lora_rank": 16}
    without = resolve(EngineConfig(), MODEL, machine(1.0)).sizing
    sizing = resolve(EngineConfig(**asked), MODEL, machine(1.0)).sizing
    assert sizing.work_bytes - without.work_bytes == 100 * adapter_bytes(MODEL, 16)
    assert sizing.kv_tokens < without.kv_tokens


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (replace(MODEL, encoder=EncoderSpec()), "is an encoder"),
        (replace(MODEL, library_config="{}"), "by the package transformers"),
    ],
)
def test_models_that_take_no_adapter_are_refused_at_the_start(
    model: ModelConfig, said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        resolve(EngineConfig(enable_lora=True), model, machine())


def test_a_gpu_computes_adapters_of_experts_by_torch_alone() -> None:
    gpu = machine(gpus=(GpuCard("card", 40 * GB, 40 * GB, (9, 0)),))
    assert resolve(EngineConfig(enable_lora=True), MODEL, gpu).config.max_loaded_loras == 8
    experts = EngineConfig(enable_lora=True, lora_target_modules="all,experts")
    with pytest.raises(SettingsError, match="--attention-backend torch"):
        resolve(experts, MODEL, gpu)
    config = replace(experts, attention_backend="torch")
    assert resolve(config, MODEL, gpu).config.max_loaded_loras == 8
