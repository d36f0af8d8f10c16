"""The matrices of a decoder that adapters may change: those of attention and of the feed-forward
parts that every token gets, the embedding and the head, each under the name that checkpoints have
for it."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from weft.config.decoder import MlpSpec
from weft.config.model import DTYPES, ModelConfig

# Kernels keep whole blocks: of ranks, inputs and outputs.
RANK_STEP = 16
IN_STEP = 64
OUT_STEP = 32


HEAD = "lm_head"
LABELS = "score"  # the head of a model that gives labels, which is trained as a whole


class Projection(NamedTuple):
    """`is_table`: a row is looked up for each token, of `in_size` rows."""

    in_size: int
    out_size: int
    is_table: bool = False


def projections(model: ModelConfig) -> dict[str, Projection]:
    """By name, as "model.layers.0.self_attn.q_proj". A model whose code is that of a library, or
    an encoder, has none that are known here."""
    found: dict[str, Projection] = {}
    if model.library_config or model.is_encoder:
        return found
    names = model.decoder.names
    found[names.embedding] = Projection(model.vocab_size, model.hidden_size, is_table=True)
    if model.pooling is None:
        found[HEAD] = Projection(model.hidden_size, model.vocab_size)
    elif model.pooling.labels:
        found[LABELS] = Projection(model.hidden_size, len(model.pooling.labels))
    for layer in range(model.num_layers):
        prefix = f"{names.layers}.{layer}"
        spec = model.decoder.layer(layer)
        if spec.state is None:
            found |= _of_attention(model, layer, f"{prefix}.{names.attention}")
        if isinstance(spec.mlp, MlpSpec):
            found |= _of_mlp(model, spec.mlp, f"{prefix}.{names.mlp}")
    return found


def _of_attention(model: ModelConfig, layer: int, prefix: str) -> dict[str, Projection]:
    names = model.decoder.names
    hidden = model.hidden_size
    q_size = model.num_heads * model.head_dim
    kv_size = model.num_kv_heads * model.head_dim
    found = {f"{prefix}.{names.out}": Projection(q_size, hidden)}
    if names.qkv_by_head:
        return found
    gates = q_size if model.decoder.layer(layer).attention.gate else 0
    sizes = [q_size + gates, kv_size, kv_size]
    if len(names.qkv) == 1:
        sizes = [sum(sizes)]
    for name, size in zip(names.qkv, sizes, strict=True):
        found[f"{prefix}.{name}"] = Projection(hidden, size)
    return found


def _of_mlp(model: ModelConfig, spec: MlpSpec, prefix: str) -> dict[str, Projection]:
    names = model.decoder.names
    hidden = model.hidden_size
    inner = spec.size or model.intermediate_size
    found = {f"{prefix}.{names.down}": Projection(inner, hidden)}
    if not spec.is_gated:
        found[f"{prefix}.{names.gate_up[-1]}"] = Projection(hidden, inner)
    elif len(names.gate_up) == 1:
        found[f"{prefix}.{names.gate_up[0]}"] = Projection(hidden, 2 * inner)
    else:
        for name in names.gate_up:
            found[f"{prefix}.{name}"] = Projection(hidden, inner)
    return found


def adapter_item_bytes(model: ModelConfig) -> int:
    """Of one value of an adapter, as it is kept: adapters are not quantised."""
    is_exact = model.dtype == "float32" and not model.quantize
    return DTYPES["float32" if is_exact else "bfloat16"]


def adapter_bytes(model: ModelConfig, rank: int, targets: Container[str] | None = None) -> int:
    """Of memory, at most, for an adapter of this rank that changes all projections, or those whose
    names end in one of `targets`."""
    num_bytes = 0
    for name, projection in projections(model).items():
        if targets is not None and name.rpartition(".")[2] not in targets:
            continue
        if projection.is_table:
            # The rows of A as they are, and B in float32.
            num_bytes += rank * projection.in_size * adapter_item_bytes(model)
            num_bytes += rank * projection.out_size * DTYPES["float32"]
            continue
        sizes = _up(projection.in_size, IN_STEP) + _up(projection.out_size, OUT_STEP)
        num_bytes += sizes * _up(rank, RANK_STEP) * adapter_item_bytes(model)
    return num_bytes


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
