"""Tiny models, and adapters for them as peft writes them: made by hand, without peft."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.func import functional_call

from tests.executor.driver import Driver, Turn, full_logprobs, ints, make_driver
from tests.models.many import GEMMA4, GEMMA4_SMALL
from tests.models.reference import TINY
from weft.config.model import ModelConfig
from weft.executor.lora.read import inspect_adapter
from weft.plan.device import DeviceReply, LoadAdapter
from weft.plan.step import Result

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ALL = (*ATTENTION, *MLP)
TABLE = "model.embed_tokens"
ENDS = (TABLE, "lm_head")
QV = ("self_attn.q_proj", "self_attn.v_proj")

# name -> family in transformers, what differs from TINY
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3", {}),
}
# Layers of two sizes of heads, keys that are the values, inputs for each layer, and K and V of
# earlier layers.
GEMMA4_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4", {**GEMMA4, "num_hidden_layers": 4}),
    "gemma4-small": ("Gemma4", GEMMA4_SMALL),
}
MOE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2moe": (
        "Qwen2Moe",
        {
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
}
FUSED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


class Base(NamedTuple):
    """A saved model."""

    folder: Path
    model: Any  # of transformers, in float32

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_folder(self.folder)

    def modules(self, endings: Iterable[str], layers: Iterable[int] = range(3)) -> list[str]:
        """Those that there are: layers may take their values from their keys."""
        weights = self.model.state_dict()
        names = [f"model.layers.{layer}.{ending}" for layer in layers for ending in endings]
        return [name for name in names if f"{name}.weight" in weights]


def make_base(family: str, folder: Path) -> Base:
    kind, changes = (FAMILIES | GEMMA4_FAMILIES | MOE_FAMILIES)[family]
    settings = {**TINY, **changes, "attn_implementation": "eager"}
    kind_of_config = kind
    if family in GEMMA4_FAMILIES:
        kind_of_config = f"{kind}Text"
        settings["vocab_size_per_layer_input"] = settings["vocab_size"]
    config = getattr(transformers, f"{kind_of_config}Config")(**settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    model.save_pretrained(folder)
    return Base(folder, model)


class Made(NamedTuple):
    """An adapter in a folder, and what it adds to the weights."""

    folder: Path
    deltas: dict[str, Tensor]  # by module: scale B A


def make_adapter(
    base: Base,
    folder: Path,
    modules: Iterable[str],
    *,
    rank: int = 8,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Made:
    """`ranks` and `alphas` are patterns of the last part of a name."""
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "bias": "none",
        "rank_pattern": ranks or {},
        "alpha_pattern": alphas or {},
        **config,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    deltas = {}
    weights = dict(base.model.named_parameters())
    for module in modules:
        # A tied head has no parameter of its own.
        named = TABLE if module == "lm_head" and "lm_head.weight" not in weights else module
        out_size, in_size = weights[f"{named}.weight"].shape
        if module == TABLE:
            out_size, in_size = in_size, out_size
        ending = module.rpartition(".")[2]
        r = (ranks or {}).get(ending, rank)
        alpha = (alphas or {}).get(ending, config["lora_alpha"])
        scale = alpha / (math.sqrt(r) if config.get("use_rslora") else r)
        a = (0.3 / math.sqrt(in_size) * torch.randn(r, in_size, generator=generator)).to(dtype)
        b = (0.3 * torch.randn(out_size, r, generator=generator)).to(dtype)
        deltas[module] = scale * b.float() @ a.float()
        if module == TABLE:
            tensors[f"base_model.model.{module}.lora_embedding_A"] = a
            tensors[f"base_model.model.{module}.lora_embedding_B"] = b
            deltas[module] = deltas[module].T
            continue
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    write_adapter(folder, tensors, config)
    return Made(folder, deltas)


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def merged_logprobs(base: Base, made: Made, tokens: list[int]) -> Tensor:
    """Of the model with what the adapter adds in its weights: [T, vocab]. Embedding and head are
    changed each by itself, also where they are one."""
    weights = {name: value.clone() for name, value in base.model.state_dict().items()}
    for module, delta in made.deltas.items():
        name = module if module in weights else f"{module}.weight"
        weights[name] += delta
    with torch.inference_mode():
        inputs = {"input_ids": torch.tensor([tokens])}
        output = functional_call(base.model, weights, kwargs=inputs, tie_weights=False)
    logits: Tensor = output.logits[0].float()
    return logits.log_softmax(-1)


def load(driver: Driver, base: Base, place: int, folder: Path, uid: str = "") -> DeviceReply:
    uid = uid or inspect_adapter(folder, base.config).uid
    return driver.runner.control(LoadAdapter(place, str(folder), uid)).result()


def make_lora_driver(
    base: Base, num_adapter_slots: int = 1, max_rank: int = 64, **settings: Any
) -> Driver:
    return make_driver(
        base.config,
        base.folder,
        max_loaded_loras=num_adapter_slots,
        max_lora_rank=max_rank,
        **settings,
    )


def run_with(driver: Driver, adapters: list[int], *turns: Turn) -> Result:
    plan = replace(driver.plan(*turns), adapters=ints(adapters))
    return driver.runner.launch(plan).result()


def logprobs_with(driver: Driver, adapters: list[int], *turns: Turn) -> Tensor:
    """Log probabilities of the requests that sample: [S, vocab]."""
    return full_logprobs(run_with(driver, adapters, *turns))
