"""A decoder built from the mechanisms that its `DecoderSpec` names. Every family of decoders uses
this class; the differences are in `config/families/`, the computations in `layers/`."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.config.decoder import MoeSpec, NormPosition, RopeConfig
from weft.config.model import ModelConfig
from weft.models.layers.altup import AltUp, AltUpLayer
from weft.models.layers.attention import Attention, PagedAttention
from weft.models.layers.cross import CrossAttention, EncodedKv
from weft.models.layers.distances import Biases, alibi
from weft.models.layers.embedding import Embedding
from weft.models.layers.factors import with_factors
from weft.models.layers.head import make_head
from weft.models.layers.kept import KeepStates
from weft.models.layers.latent import LatentAttention
from weft.models.layers.layer_inputs import LayerInputGate, LayerInputTable
from weft.models.layers.mlp import CutMLP, GatedMLP, PlainMLP, make_mlp
from weft.models.layers.moe import ExpertMLP
from weft.models.layers.moe_beside_dense import ExpertsBesideDense
from weft.models.layers.norm import CenteredNorm, RmsNorm, make_norm
from weft.models.layers.rope import Rope
from weft.models.layers.states import LayerStates, StateLayer, StateMixer, make_state_mixer
from weft.models.layers.weight import Weights, vector
from weft.ops.plain import PlainOps
from weft.ops.protocol import Ops
from weft.ops.stages import Absent


class Block:
    """x + scale · post(f(pre(x))): f is attention or the feed-forward part; either norm may be
    absent. With `streams`, pre(x) + scale · f(pre(x))."""

    def __init__(
        self,
        pre: RmsNorm | CenteredNorm | None,
        post: RmsNorm | CenteredNorm | None,
        scale: float,
        streams: Ops | None = None,
    ) -> None:
        self.pre = pre
        self.post = post
        self._scale = scale
        self._streams = streams

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the output of f is added to, and the input of f; both [T, hidden]."""
        if self._streams is None:
            return x, self.input(x)
        normed = self._streams.computed(self.input(x))
        return normed, normed

    def input(self, x: Tensor) -> Tensor:
        """The input of f: [T, hidden] -> [T, hidden]"""
        if self.pre is None:
            return x
        return self.pre(x)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the output y of f to the residual stream x."""
        if self.post is not None:
            y = self.post(y)
        # A plain sum: the product that computes y may add itself to x, without an extra pass.
        if self._scale == 1:
            return x + y
        return x + self._scale * y


class DecoderLayer:
    """Attention, or a mixer with a state in its place or beside it, then the feed-forward part; or
    both in parallel (`NormPosition.PARALLEL`). Some layers have only one of the two."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        rope: Rope | None,
        ops: Ops,
        states: LayerStates | None,
        encoded: EncodedKv | None,
        biases: Biases | None = None,
    ) -> None:
        spec = config.decoder.layer(layer)
        self._names = config.decoder.names
        self._ops = ops
        self._is_parallel = spec.norms.is_parallel
        pre_norms = spec.norms is not NormPosition.POST
        feed_pre_norms = pre_norms and spec.norms is not NormPosition.PARALLEL
        self.mlp = make_feed_forward(config, layer, ops)
        if self.mlp is None or isinstance(self.mlp, ExpertsBesideDense):
            feed_pre_norms = False  # with experts beside it, both parts norm their input
        post_norms = spec.norms in (NormPosition.POST, NormPosition.BOTH)
        mixes = spec.attends or spec.state is not None
        assert not spec.norms.is_parallel or (mixes and self.mlp is not None), "it needs two parts"

        def norm(is_there: bool, eps: float = 0.0) -> RmsNorm | CenteredNorm | None:
            return make_norm(config, config.hidden_size, ops, eps) if is_there else None

        scale = spec.residual_scale
        streams = ops if spec.norms is NormPosition.STREAM else None
        before = norm(mixes and pre_norms, spec.mix_eps)
        self.mix = Block(before, norm(mixes and post_norms), scale, streams)
        before = norm(feed_pre_norms, spec.feed_eps)
        feed_post_norms = self.mlp is not None and post_norms
        self.feed = Block(before, norm(feed_post_norms), spec.feed_scale or scale, streams)
        self.attention: Attention | LatentAttention | None = None
        self.state: StateMixer | None = None
        if spec.state is not None:
            self.state = make_state_mixer(spec.state, StateLayer(config, layer, ops, states))
        if spec.attends and spec.attention.latent is not None:
            self.attention = LatentAttention(config, spec.attention.latent, layer, rope, ops)
        elif spec.attends:
            self.attention = Attention(config, layer, rope, ops, biases)
        self.cross: CrossAttention | None = None
        self.hear = Block(None, None, scale)
        if encoded is not None:
            self.cross = CrossAttention(config, layer, ops, encoded)
            self.hear = Block(norm(pre_norms), None, scale)
        self.input_gate: LayerInputGate | None = None
        if config.decoder.layer_inputs is not None:
            self.input_gate = LayerInputGate(config, config.decoder.layer_inputs, ops)
        self.factor = ops.vector(1) if spec.has_factor else None
        self.narrows = layer == config.last_storing_layer
        assert not (self._is_parallel and self.state is not None), (
            "states stand in layers of two parts"
        )

    def __call__(
        self, x: Tensor, attention: PagedAttention, layer_input: Tensor | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden], or fewer rows (`PagedAttention.narrow`). `layer_input`
        [T, ..]: the inputs of this layer, if the model has inputs for each layer."""
        x = self._mixed_and_fed(x, attention)
        if self.input_gate is not None and layer_input is not None:
            if self.narrows:
                layer_input = self._ops.computed(attention.narrow(layer_input))
            x = self.input_gate(x, layer_input)
        if self.factor is not None:
            x = self._ops.multiply(x, self.factor)
        return x

    def _mixed_and_fed(self, x: Tensor, attention: PagedAttention) -> Tensor:
        if self._is_parallel:
            # `computed` forces the value now, because the first sum overwrites x.
            normed = self._ops.computed(self.mix.input(x))
            read_by_mlp = normed
            if self.feed.pre is not None:
                read_by_mlp = self._ops.computed(self.feed.input(x))
            assert self.attention is not None
            assert self.mlp is not None
            mixed = self.attention(normed, attention)
            if self.narrows:
                x = attention.narrow(x)
                read_by_mlp = attention.narrow(read_by_mlp)
            return self.feed.add(self.mix.add(x, mixed), self.mlp(read_by_mlp))
        x = self._with_mixed(x, attention)
        if self.cross is not None:
            x = self.hear.add(x, self.cross(self.hear.input(x)))
        if self.mlp is None:
            return x
        x, normed = self.feed.enter(x)
        return self.feed.add(x, self.mlp(normed))

    def _with_mixed(self, x: Tensor, attention: PagedAttention) -> Tensor:
        """x and what attention and the mixer with a state add to it."""
        if self.state is None and self.attention is None:
            return x
        x, normed = self.mix.enter(x)
        if self.state is None or self.attention is None:
            x = x if self.state is None else self.mix.add(x, self.state(normed))
        else:
            # Both read it, and the first sum overwrites x.
            normed = self._ops.computed(normed)
            x = self._ops.computed(self.mix.add(x, self.state(normed)))
        # A mixer with a state computes all tokens.
        mixed = None if self.attention is None else self.attention(normed, attention)
        x = attention.narrow(x) if self.narrows else x
        return x if mixed is None else self.mix.add(x, mixed)

    def weights(self, prefix: str) -> Weights:
        names = self._names
        if self.mix.pre is not None:
            yield from self.mix.pre.weights(f"{prefix}.{names.attention_norm}")
        if self.attention is not None:
            yield from self.attention.weights(f"{prefix}.{names.attention}")
        if self.state is not None:
            yield from self.state.weights(f"{prefix}.{names.state.mixer}")
        if self.mix.post is not None:
            yield from self.mix.post.weights(f"{prefix}.{names.attention_post_norm}")
        if self.cross is not None:
            yield from self.cross.weights(f"{prefix}.{names.cross}")
        if self.hear.pre is not None:
            yield from self.hear.pre.weights(f"{prefix}.{names.cross_norm}")
        if self.feed.pre is not None:
            yield from self.feed.pre.weights(f"{prefix}.{names.mlp_norm}")
        if self.mlp is not None:
            is_named = bool(names.mlp) and not isinstance(self.mlp, ExpertsBesideDense)
            yield from self.mlp.weights(f"{prefix}.{names.mlp}" if is_named else prefix)
        if self.feed.post is not None:
            yield from self.feed.post.weights(f"{prefix}.{names.mlp_post_norm}")
        if self.input_gate is not None:
            yield from self.input_gate.weights(prefix)
        if self.factor is not None:
            yield vector(f"{prefix}.{names.layer_factor}", self.factor)


def make_feed_forward(
    config: ModelConfig, layer: int, ops: Ops
) -> GatedMLP | PlainMLP | CutMLP | ExpertMLP | ExpertsBesideDense | None:
    """The feed-forward part of a layer; None: it has none."""
    spec = config.decoder.layer(layer).mlp
    if spec is None:
        return None
    if isinstance(spec, MoeSpec) and spec.dense_size:
        return ExpertsBesideDense(config, spec, layer, ops)
    if isinstance(spec, MoeSpec):
        return ExpertMLP(config, spec, layer, ops)
    return make_mlp(config, spec, ops)


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        states: LayerStates | None = None,
        encoded: EncodedKv | None = None,
        kept: KeepStates | None = None,
    ) -> None:
        """`states` holds the states of layers that keep one, `encoded` the keys and values that
        layers read of an encoder, `kept` what a head reads."""
        spec = config.decoder
        self._kept = kept
        assert (encoded is None) == (spec.cross is None), "it belongs to layers that read it"
        here = ops.layer_range(config.num_layers)
        # Of parts that other processes compute, only the names of the weights exist here.
        elsewhere = PlainOps(torch.float32, torch.device("cpu"), placement=Absent())
        has_table = here.is_first or (here.is_last and config.tie_embeddings)
        ops_of_table: Ops = ops if has_table else elsewhere
        self._ops = ops
        self._range = here
        self._hidden_size = config.hidden_size
        self._names = spec.names
        self._factors = spec.factors
        self._deepstack = spec.deepstack
        self.embedding = Embedding(
            config.vocab_size,
            config.hidden_size,
            ops_of_table,
            # Models are trained with this factor rounded to their dtype.
            scale=float(torch.tensor(spec.embedding_scale, dtype=getattr(torch, config.dtype))),
        )
        self.embedding_norm: RmsNorm | CenteredNorm | None = None
        if spec.names.embedding_norm:
            self.embedding_norm = make_norm(config, config.hidden_size, ops_of_table)
        self._positions: Tensor | None = None
        if spec.num_positions:
            self._positions = ops_of_table.vector(
                spec.num_positions * config.hidden_size, exact=True
            )
        self.layer_inputs: LayerInputTable | None = None
        if spec.layer_inputs is not None:
            self.layer_inputs = LayerInputTable(config, spec.layer_inputs, ops_of_table)
        # Layers with equal rotations share one table of angles.
        ropes: dict[tuple[RopeConfig, int], Rope] = {}
        biases: Biases | None = None
        self.altup: AltUp | None = None
        if spec.altup is not None:
            self.altup = AltUp(config, spec.altup, ops)
        self.layers: list[DecoderLayer | AltUpLayer] = []
        for layer in range(config.num_layers):
            rope = None
            of_layer = spec.layer(layer)
            rotation = of_layer.attention.rope
            if rotation is not None and of_layer.attends:
                _, head_dim = config.kv_shape(layer)
                made = Rope(rotation, config, head_dim)
                rope = ropes.setdefault((rotation, head_dim), made)
            ops_of_layer: Ops = ops if layer in here.layers else elsewhere
            if of_layer.attention.alibi and biases is None:
                reach = config.context_length or config.max_position
                biases = alibi(config.num_heads, of_layer.attention.alibi, reach, ops)
            if spec.altup is not None:
                self.layers.append(AltUpLayer(config, spec.altup, layer, rope, ops))
                continue
            made_layer = DecoderLayer(config, layer, rope, ops_of_layer, states, encoded, biases)
            self.layers.append(made_layer)
        self.norm = make_norm(config, config.hidden_size, ops, spec.last_eps)
        self.head = make_head(config, self.embedding, ops if here.is_last else elsewhere)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        return self.run_layers(0, len(self.layers), None, tokens, positions, attention, vectors)

    def run_layers(
        self,
        first: int,
        last: int,
        carried: Tensor | None,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """`LayeredModel.run_layers`. Layers that other processes compute leave x unchanged."""
        here = self._range
        if carried is not None:
            x = carried
        elif here.is_first:
            x = self.embedding(tokens, vectors)
            if self.embedding_norm is not None:
                x = self.embedding_norm(x)
            if self._positions is not None:
                x = self._ops.add_positions(x, positions, self._positions)
        else:
            x = self._ops.take(len(tokens), self._hidden_size)
        table = self.layer_inputs
        inputs = None
        if table is not None:
            assert carried is None, "a model with inputs for each layer runs in one piece"
            inputs = table(tokens, x)
        if self.altup is not None:
            x = self.altup.open(x)
        end = min(last, here.layers.stop)
        for index in range(max(first, here.layers.start), end):
            x = self._keep(x, index)
            layer_input = None
            if table is not None and inputs is not None:
                layer_input = table.of_layer(inputs, index)
            x = self.layers[index](x, attention, layer_input)
            if table is not None and inputs is not None and self.layers[index].narrows:
                inputs = table.narrow(inputs, attention)
            if index < self._deepstack:
                x = self._ops.add_vectors(x, tokens, vectors, index + 1)
        if self.altup is not None:
            x = self.altup.close(x)
        x = self._ops.computed(x)
        if end == len(self.layers):
            x = self._keep(x, end)
        if first < end == here.layers.stop and not here.is_last:
            x = self._ops.give(x)
        return x

    def _keep(self, x: Tensor, layer: int) -> Tensor:
        """Keep the input of a layer, if a head reads it."""
        if self._kept is None or not self._kept.reads(layer):
            return x
        x = self._ops.computed(x)
        self._kept.keep(x, layer)
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        return self._ops.computed(self.norm(hidden))

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        # The final norm runs here and not in `forward`, because only the last tokens need it.
        assert self.head is not None, "this model has neither logits nor labels"
        rows = hidden if places is None else hidden.index_select(0, places)
        return self.head(self.norm(rows), places)

    def weights(self) -> Weights:
        names = self._names
        yield from self.embedding.weights(names.embedding)
        if self.embedding_norm is not None:
            yield from self.embedding_norm.weights(names.embedding_norm)
        if self._positions is not None:
            shape = (len(self._positions) // self._hidden_size, self._hidden_size)
            yield vector(f"{names.positions}.weight", self._positions, shape=shape)
        if self.layer_inputs is not None:
            yield from self.layer_inputs.weights()
        if self.altup is not None:
            yield from self.altup.weights()
        for index, layer in enumerate(self.layers):
            prefix = f"{names.layers}.{index}"
            yield from with_factors(layer.weights(prefix), prefix, self._factors)
        yield from self.norm.weights(names.norm)
        if self.head is not None:
            yield from self.head.weights()
