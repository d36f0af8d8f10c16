"""Random heads for weft-nano, as their makers write them: nearly all that they guess is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN = 384
VOCAB = 4096
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
INNER = 256

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "draft_vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def speculators(**changes: Any) -> dict[str, Any]:
    """The `config.json` of the same head, as the package speculators writes it."""
    own = {key: value for key, value in LLAMA.items() if key != "draft_vocab_size"}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": LLAMA["draft_vocab_size"],
        "transformer_layer_config": {**own, "architectures": ["LlamaForCausalLM"]},
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        **changes,
    }


def save_eagle3(
    folder: Path, config: dict[str, Any] | None = None, **changes: Tensor | None
) -> Path:
    """Write a head with this `config.json`; `changes` replaces its tensors by name, None leaves one
    out. Returns the folder."""
    config = LLAMA if config is None else config
    layer = "layers.0" if "speculators_model_type" in config else "midlayer"
    num_logits = config.get("draft_vocab_size", VOCAB)
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).to(torch.bfloat16)

    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors: dict[str, Tensor | None] = {
        f"{layer}.{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for name in norms
    }
    q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors |= {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        f"{layer}.self_attn.q_proj.weight": random(q_size, 2 * HIDDEN),
        f"{layer}.self_attn.k_proj.weight": random(kv_size, 2 * HIDDEN),
        f"{layer}.self_attn.v_proj.weight": random(kv_size, 2 * HIDDEN),
        f"{layer}.self_attn.o_proj.weight": random(HIDDEN, q_size),
        f"{layer}.mlp.gate_proj.weight": random(INNER, HIDDEN),
        f"{layer}.mlp.up_proj.weight": random(INNER, HIDDEN),
        f"{layer}.mlp.down_proj.weight": random(HIDDEN, INNER),
        "norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": random(num_logits, HIDDEN),
    }
    if num_logits < VOCAB:
        ids = torch.arange(num_logits) * (VOCAB // num_logits)
        tensors["d2t"] = ids - torch.arange(num_logits)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, value=True)
    tensors |= changes
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
