"""The matrices of a decoder that adapters may change, by their names in checkpoints: those of
attention and of the feed-forward parts, the embedding and the head."""

from __future__ import annotations

from typing import NamedTuple

from weft.config.decoder import LatentSpec, MlpSpec, MoeSpec
from weft.config.model import DTYPES, ModelConfig

# Kernels keep full blocks of ranks, inputs and outputs.
RANK_STEP = 16
IN_STEP = 64
OUT_STEP = 32


ALL = "all"
EXPERTS = "experts"
HEAD = "lm_head"
LABELS = "score"  # the head of a model that gives labels, which is trained as a whole


class ExpertSlice(NamedTuple):
    """The slice of an expert in the tensor [num_experts, rows, in] of all experts."""

    name: str  # name of that tensor
    expert: int
    num_experts: int
    first: int  # first row of the matrix
    num_rows: int  # rows per expert in the tensor


class Projection(NamedTuple):
    """A matrix. `is_table`: an embedding, of which each token gets one of `in_size` rows. `stack`:
    the slice of an expert in the tensor of all experts."""

    in_size: int
    out_size: int
    is_table: bool = False
    stack: ExpertSlice | None = None
    is_tied: bool = False  # the head is the embedding
    may_be_full: bool = False  # an adapter may replace it by a matrix of any size

    @property
    def stored_shape(self) -> tuple[int, int]:
        """In checkpoints."""
        if self.is_table:
            return (self.in_size, self.out_size)
        return (self.out_size, self.in_size)

    @property
    def full_rank(self) -> int:
        """The rank of the difference between two such matrices."""
        return min(self.in_size, self.out_size)

    def most_rank(self, max_rank: int) -> int:
        """The highest rank that an adapter may have here, if `max_rank` is that of pairs."""
        return max(max_rank, self.full_rank) if self.may_be_full else max_rank


def projections(model: ModelConfig, full_modules: str = "") -> dict[str, Projection]:
    """The projections of a model by name, as "model.layers.0.self_attn.q_proj". None are known for
    an encoder, and for a model that the code of a library computes. `full_modules`: a text that
    names those which an adapter may replace, by the last parts of their names, with commas."""
    words = {word.strip() for word in full_modules.split(",")}
    return {
        name: one._replace(may_be_full=one.stack is None and target_of(name, one) in words)
        for name, one in _projections(model).items()
    }


def _projections(model: ModelConfig) -> dict[str, Projection]:
    found: dict[str, Projection] = {}
    if model.library_config or model.is_encoder:
        return found
    names = model.decoder.names
    found[names.embedding] = Projection(model.vocab_size, model.hidden_size, is_table=True)
    if model.pooling is None:
        head = Projection(model.hidden_size, model.vocab_size, is_tied=model.tie_embeddings)
        found[HEAD] = head
    elif model.pooling.labels:
        found[LABELS] = Projection(model.hidden_size, len(model.pooling.labels))
    for layer in range(model.num_layers):
        prefix = f"{names.layers}.{layer}"
        spec = model.decoder.layer(layer)
        if spec.attends:
            found |= _of_attention(model, layer, f"{prefix}.{names.attention}")
        if spec.mlp is None:
            continue
        if isinstance(spec.mlp, MlpSpec):
            found |= _of_mlp(model, spec.mlp, f"{prefix}.{names.mlp}")
        elif spec.mlp.dense_size:
            dense = MlpSpec(size=spec.mlp.dense_size, activation=spec.mlp.activation)
            found |= _of_mlp(model, dense, f"{prefix}.{names.mlp}")
            found |= _of_experts(model, spec.mlp, prefix)
        else:
            found |= _of_experts(model, spec.mlp, f"{prefix}.{names.mlp}")
    # What an adapter adds would have to be multiplied by these factors, too.
    multiplied = {one.name.removesuffix(".weight") for one in model.decoder.factors}
    for layer in range(model.num_layers):
        for name in multiplied:
            found.pop(f"{names.layers}.{layer}.{name}", None)
    return found


def _of_attention(model: ModelConfig, layer: int, prefix: str) -> dict[str, Projection]:
    names = model.decoder.names
    hidden = model.hidden_size
    latent = model.decoder.layer(layer).attention.latent
    if latent is not None:
        return _of_latents(model, latent, prefix)
    spec = model.decoder.layer(layer).attention
    kv_heads, head_dim = model.kv_shape(layer)
    q_size = model.num_heads * head_dim
    kv_size = kv_heads * head_dim
    found = {f"{prefix}.{names.out}": Projection(q_size, hidden)}
    if names.qkv_by_head:
        return found
    gates = q_size if spec.gate else 0
    sizes = [q_size + gates]
    if spec.kv_of is None:
        sizes += [kv_size] if spec.values_are_keys else [kv_size, kv_size]
    if len(names.qkv) == 1:
        sizes = [sum(sizes)]
    for name, size in zip(names.qkv, sizes, strict=False):
        found[f"{prefix}.{name}"] = Projection(hidden, size)
    return found


def _of_latents(model: ModelConfig, latent: LatentSpec, prefix: str) -> dict[str, Projection]:
    """All projections except the one that makes keys and values of latents, which is kept head by
    head."""
    hidden = model.hidden_size
    names = model.decoder.names.latent
    queries = model.num_heads * latent.query_dim
    found = {
        names.latent_in: Projection(hidden, latent.key_dim),
        model.decoder.names.out: Projection(model.num_heads * latent.value_dim, hidden),
    }
    if latent.query_rank:
        found[names.query_in] = Projection(hidden, latent.query_rank)
        found[names.query_out] = Projection(latent.query_rank, queries)
    else:
        found[names.queries] = Projection(hidden, queries)
    return {f"{prefix}.{name}": projection for name, projection in found.items()}


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


def _of_experts(model: ModelConfig, spec: MoeSpec, prefix: str) -> dict[str, Projection]:
    """The projections of all experts, unless their gates and ups alternate or their inputs come
    first in the file; and the projections of the shared part."""
    names = model.decoder.names.experts
    hidden = model.hidden_size
    num = spec.router.num_experts
    found: dict[str, Projection] = {}
    if spec.shared_size:
        base = prefix.rpartition(".")[0] if names.shared_is_beside else prefix
        shared = MlpSpec(size=spec.shared_size, activation=spec.activation, is_gated=spec.is_gated)
        found |= _of_mlp(model, shared, f"{base}.{names.shared}")
    if names.is_transposed:
        return found
    both = f"{prefix}.{names.all_gate_up}"
    for expert in range(num):
        own = f"{prefix}.{names.experts}.{expert}"
        for index, name in enumerate(names.gate_up):
            num_rows = len(names.gate_up) * spec.size
            stack = ExpertSlice(both, expert, num, index * spec.size, num_rows)
            found[f"{own}.{name}"] = Projection(hidden, spec.size, stack=stack)
        stack = ExpertSlice(f"{prefix}.{names.all_down}", expert, num, 0, hidden)
        found[f"{own}.{names.down}"] = Projection(spec.size, hidden, stack=stack)
    return found


def target_of(name: str, projection: Projection) -> str:
    """The name of the projection in settings: the last part of its name, or EXPERTS."""
    return name.rpartition(".")[2] if projection.stack is None else EXPERTS


class Targets:
    """The projections that adapters may change, read from a text: names with commas, or ALL. ALL
    excludes experts: an adapter of experts may need as much memory as a model."""

    def __init__(self, text: str) -> None:
        self._words = {word.strip() for word in (text or ALL).split(",")}

    def __contains__(self, target: object) -> bool:
        if ALL in self._words and target != EXPERTS:
            return True
        return target in self._words

    def __str__(self) -> str:
        return ", ".join(sorted(self._words))


def adapter_item_bytes(model: ModelConfig) -> int:
    """Bytes of one kept value of an adapter: adapters are not quantised."""
    is_exact = model.dtype == "float32" and not model.quantize
    return DTYPES["float32" if is_exact else "bfloat16"]


def adapter_bytes(
    model: ModelConfig, max_rank: int, targets: str = "", full_modules: str = ""
) -> int:
    """Maximal bytes of memory for an adapter of this rank that changes all projections that
    `targets` allows, and replaces those that `full_modules` names."""
    allowed = Targets(targets)
    num_bytes = 0
    for name, projection in projections(model, full_modules).items():
        if target_of(name, projection) not in allowed:
            continue
        rank = projection.most_rank(max_rank)
        if projection.is_table:
            # The rows of A in the kept type, and B in float32.
            num_bytes += rank * projection.in_size * adapter_item_bytes(model)
            num_bytes += rank * projection.out_size * DTYPES["float32"]
            continue
        sizes = _up(projection.in_size, IN_STEP) + _up(projection.out_size, OUT_STEP)
        num_bytes += sizes * _up(rank, RANK_STEP) * adapter_item_bytes(model)
    return num_bytes


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
