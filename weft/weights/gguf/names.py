"""Translates the names of tensors in a GGUF file to weft's names, and marks tensors whose rows have
another order.

Most architectures use Llama's names. The families (`config/families/`) have the names that differ,
and say which architectures rotate pairs of consecutive rows, [heads, D / 2, 2], where transformers
rotates the halves of a head, [heads, 2, D / 2].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from weft.config.families.gguf import Architecture
from weft.config.families.table import GGUF_FILES
from weft.json_types import JsonMapping
from weft.weights.safetensors import TensorEntry

# Ignored tensors: factors of frequencies, which `config/gguf.py` reads, and tables of angles, which
# weft computes from the configuration.
ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS = "rope_factors_short.weight"
LONG_FACTORS = "rope_factors_long.weight"
IGNORED = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS, "attn_rot_embd.weight")

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
    # One tensor for all experts.
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    # Of a layer that predicts a token ahead, with the names of DeepSeek V3.
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}


class _TensorName(NamedTuple):
    """Where a tensor stands in the model, by its name in the file."""

    layer: int | None  # None: outside of layers
    part: str  # "attn_q"
    kind: str  # "weight" or "bias"; "": the name has none

    @property
    def unsplit(self) -> str:
        if not self.kind:
            return self.part
        return f"{self.part}.{self.kind}"


def renamed(tensors: Mapping[str, TensorEntry], metadata: JsonMapping) -> dict[str, TensorEntry]:
    """The tensors of a file under weft's names. A tensor with an unknown name keeps its name; the
    later error for unexpected tensors contains it."""
    found: dict[str, TensorEntry] = {}
    architecture = _architecture(metadata)
    for name, entry in tensors.items():
        if name.endswith(IGNORED):
            continue
        parsed = _parsed(name)
        for one, part in _split(parsed, entry, architecture, metadata):
            if one.unsplit in architecture.rows:
                part = part._replace(shape=(1, *part.shape))
            if one.unsplit in architecture.flat:
                part = part._replace(shape=(math.prod(part.shape),))
            if one.unsplit in architecture.joined and len(part.shape) == 3:
                part = part._replace(shape=(part.shape[0] * part.shape[1], part.shape[2]))
            if one.unsplit in architecture.convs and len(part.shape) == 2:
                part = part._replace(shape=(part.shape[0], 1, part.shape[1]))
            ours = _name(one, architecture, tensors) or name
            paired_rows = 0
            if architecture.has_pairs:
                paired_rows = _paired_rows(one, part, metadata)
            found[ours] = part._replace(name=ours, paired_rows=paired_rows)
    return found


def _architecture(metadata: JsonMapping) -> Architecture:
    """The architecture of the file. Unknown ones count as Llama here, and are refused when the
    configuration is read."""
    name = metadata.get("general.architecture")
    return GGUF_FILES.get(str(name), GGUF_FILES["llama"]).architecture


def _parsed(name: str) -> _TensorName:
    block, _, rest = name.partition(".")
    index, _, inner = rest.partition(".")
    if block == "blk" and index.isascii() and index.isdigit():
        part, dot, kind = inner.rpartition(".")
        if not dot:
            return _TensorName(int(index), inner, "")
        return _TensorName(int(index), part, kind)
    base, _, kind = name.rpartition(".")
    return _TensorName(None, base, kind)


def _name(
    parsed: _TensorName, architecture: Architecture, tensors: Mapping[str, TensorEntry]
) -> str:
    """weft's name for a tensor; "": its name is unknown."""
    if parsed.layer is None:
        ours = architecture.outside.get(parsed.part) or _OUTSIDE.get(parsed.part, "")
        return ours and f"{ours}.{parsed.kind}"
    names = {**_OF_A_LAYER, **architecture.parts}
    states = architecture.states
    if states is not None and f"blk.{parsed.layer}.{states.tensor}" in tensors:
        names |= states.parts
    prefix = f"{architecture.layers}.{parsed.layer}"
    if parsed.unsplit in names:
        return f"{prefix}.{names[parsed.unsplit]}"
    if parsed.part in names:
        return f"{prefix}.{names[parsed.part]}.{parsed.kind}"
    part, _, expert = parsed.part.partition(".")
    # Old files have one tensor per expert: ffn_up.3 is expert 3 of ffn_up_exps.
    experts, _, last = names.get(f"{part}_exps", "").rpartition(".")
    if not experts or not expert.isascii() or not expert.isdigit():
        return ""
    return f"{prefix}.{experts}.{int(expert)}.{last}.{parsed.kind}"


def _split(
    parsed: _TensorName, entry: TensorEntry, architecture: Architecture, metadata: JsonMapping
) -> Iterator[tuple[_TensorName, TensorEntry]]:
    """The tensor; or its queries, keys and values separately, if it holds all three and weft's
    model has three weights."""
    num_heads, num_kv_heads = _num_heads(metadata)
    num_rows = entry.shape[0]
    heads_in_all = num_heads + 2 * num_kv_heads
    # If the rows cannot be divided by heads, the shape is refused later.
    if parsed.part != "attn_qkv" or not architecture.splits_qkv or num_rows % heads_in_all:
        yield parsed, entry
        return
    row_bytes = entry.num_bytes // num_rows
    first = 0
    for part, heads in (("attn_q", num_heads), ("attn_k", num_kv_heads), ("attn_v", num_kv_heads)):
        num = num_rows // heads_in_all * heads
        yield (
            parsed._replace(part=part),
            entry._replace(
                shape=(num, *entry.shape[1:]),
                start=entry.start + first * row_bytes,
                num_bytes=num * row_bytes,
            ),
        )
        first += num


def _num_heads(metadata: JsonMapping) -> tuple[int, int]:
    """The numbers of query heads and of key heads. Invalid values are refused when the
    configuration is read."""
    architecture = metadata.get("general.architecture")
    num_heads = metadata.get(f"{architecture}.attention.head_count")
    if not isinstance(num_heads, int) or num_heads < 1:
        num_heads = 1
    num_kv_heads = metadata.get(f"{architecture}.attention.head_count_kv")
    if isinstance(num_kv_heads, np.ndarray):  # per layer; layers with a state have none
        num_kv_heads = int(num_kv_heads.max(initial=0))
    if not isinstance(num_kv_heads, int) or num_kv_heads < 1:
        num_kv_heads = num_heads
    return num_heads, num_kv_heads


def _paired_rows(parsed: _TensorName, entry: TensorEntry, metadata: JsonMapping) -> int:
    """The number of rows of a head, if rotated pairs are consecutive rows; 0 if rows are in weft's
    order."""
    num_heads, num_kv_heads = _num_heads(metadata)
    if parsed.part == "attn_k":
        num_heads = num_kv_heads
    elif parsed.part != "attn_q":
        return 0
    if entry.shape[0] % (2 * num_heads):
        return 0
    return entry.shape[0] // num_heads
