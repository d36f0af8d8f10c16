"""Under which names weft knows the tensors of a GGUF file, and which of them have their rows in
another order.

Most architectures have Llama's names; `config/gguf_architectures.py` has those that differ, and
says which architectures rotate pairs of rows that lie side by side, [heads, D / 2, 2], where
transformers rotates the halves of a head, [heads, 2, D / 2].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.config.gguf_architectures import ARCHITECTURES, Architecture
from weft.executor.weights.safetensors import TensorEntry

# Tables of angles, which follow from the configuration, and factors of frequencies, which
# `config/gguf.py` reads.
ROPE_FACTORS = "rope_freqs.weight"
IGNORED = (ROPE_FACTORS, "attn_rot_embd.weight")

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def renamed(
    tensors: Mapping[str, TensorEntry], metadata: Mapping[str, Any]
) -> dict[str, TensorEntry]:
    """The tensors of a file under weft's names. One with an unknown name keeps it, and is then
    refused with it."""
    found: dict[str, TensorEntry] = {}
    architecture = _architecture(metadata)
    for name, entry in tensors.items():
        if name.endswith(IGNORED):
            continue
        ours = _name(name, architecture)
        paired_rows = 0
        if architecture.has_pairs:
            paired_rows = _paired_rows(name, entry, metadata)
        found[ours] = entry._replace(name=ours, paired_rows=paired_rows)
    return found


def _architecture(metadata: Mapping[str, Any]) -> Architecture:
    """One that is not known is refused where the configuration is read."""
    name = metadata.get("general.architecture")
    return ARCHITECTURES.get(str(name), ARCHITECTURES["llama"])


def _name(name: str, architecture: Architecture) -> str:
    base, _, kind = name.rpartition(".")
    if base in _OUTSIDE:
        return f"{_OUTSIDE[base]}.{kind}"
    block, _, rest = base.partition(".")
    index, _, part = rest.partition(".")
    ours = architecture.parts.get(part) or _OF_A_LAYER.get(part)
    if block == "blk" and index.isascii() and index.isdigit() and ours is not None:
        return f"model.layers.{int(index)}.{ours}.{kind}"
    return name


def _paired_rows(name: str, entry: TensorEntry, metadata: Mapping[str, Any]) -> int:
    """The rows of a head, if their pairs lie side by side; 0 for rows in weft's order."""
    architecture = metadata.get("general.architecture")
    part = name.rpartition(".")[0].rpartition(".")[2]
    if part not in ("attn_q", "attn_k"):
        return 0
    num_heads = metadata.get(f"{architecture}.attention.head_count", 0)
    if part == "attn_k":
        num_heads = metadata.get(f"{architecture}.attention.head_count_kv", num_heads)
    # Where the heads do not divide the rows, the shapes are refused a little later.
    if not isinstance(num_heads, int) or num_heads < 1 or entry.shape[0] % (2 * num_heads):
        return 0
    return entry.shape[0] // num_heads
