"""The cost of a decoder's mechanisms besides its products: passes over the activations.

A layer of Llama has no passes: kernels compute its norms while they read the input of a product,
and its sums while they write the output. On a CPU a step is one call, and a pass is a further
operation in it; no mechanism adds calls. Knows no kernel.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from weft.config.decoder import (
    DecoderSpec,
    LayerSpec,
    LightningSpec,
    Mamba1Spec,
    MambaSpec,
    MoeSpec,
    NormPosition,
    QkNorm,
    ShortConvSpec,
)


class Passes(NamedTuple):
    """The number of passes in a step, by mechanism."""

    by_mechanism: dict[str, int]
    others: int  # number of other operations of these layers

    @property
    def total(self) -> int:
        return sum(self.by_mechanism.values())


# Operations of attention: queries, keys and values; rotation; attention; output.
ATTENTION_OPERATIONS = 4
# Of a convolution: inputs; convolution; output.
CONV_OPERATIONS = 3
# Of the delta rule: inputs; rates; convolution; delta rule; output.
DELTA_OPERATIONS = 5
# Of Mamba 2: inputs; convolution; Mamba; output.
MAMBA_OPERATIONS = 4
# Of Mamba 1: inputs; convolution; what makes steps, B and C; steps; Mamba; output.
MAMBA1_OPERATIONS = 6
# Of lightning attention: inputs; gates; attention; output.
LIGHTNING_OPERATIONS = 4
# Of a feed-forward part: gate and up; down.
MLP_OPERATIONS = 2
# Attention by latents: norm of the input of two products, norm of the latent, the queries' rotated
# parts.
LATENT_PASSES = 3
# Of an indexer: queries, key and weights; rotation; choice and attention to what is chosen. Passes:
# the norm of its key, and the copy of it.
INDEXER_OPERATIONS = 5
INDEXER_PASSES = 2


# Inputs for each layer: the norm of its part of a projection, the product with its gate, and the
# norm of what it adds; the gate and its output. In a step, the rows of a table and the projection.
LAYER_INPUT_PASSES = 3
LAYER_INPUT_OPERATIONS = 2
TABLE_OPERATIONS = 2
# Streams: prediction; two copies of a stream; the sum of three terms and its factor; correction;
# the scale; norms that are added to the other streams. Two factors, each of two small products, and
# two of low rank.
ALTUP_PASSES = 11
ALTUP_OPERATIONS = 6


def own_passes(decoder: DecoderSpec, num_layers: int, num_heads: int) -> Passes:
    """The passes of all layers that are not part of a product, and the small products of single
    heads."""
    found: Counter[str] = Counter()
    others = 0
    for index in range(num_layers):
        layer = decoder.layer(index)
        _count(decoder, layer, found)
        if layer.attends and layer.attention.latent is not None:
            found["products of single heads"] += 2 * num_heads
            found["norms and parts of latents"] += LATENT_PASSES
            if layer.attention.latent.indexer is not None:
                found["norms and keys of indexers"] += INDEXER_PASSES
        others += _operations(layer)
        if layer.has_factor:
            found["factors of layers"] += 1
        if decoder.layer_inputs is not None:
            found["inputs for each layer"] += LAYER_INPUT_PASSES
            others += LAYER_INPUT_OPERATIONS
        if decoder.altup is not None:
            found["streams"] += ALTUP_PASSES
            others += ALTUP_OPERATIONS
    if decoder.layer_inputs is not None:
        others += TABLE_OPERATIONS
    return Passes(dict(found), others)


def _operations(layer: LayerSpec) -> int:
    num = 0
    if layer.attends:
        num += ATTENTION_OPERATIONS
        latent = layer.attention.latent
        # Queries and the latent are two products, or three.
        num += (latent is not None) + (latent is not None and latent.query_rank > 0)
        if latent is not None and latent.indexer is not None:
            num += INDEXER_OPERATIONS
    if isinstance(layer.state, ShortConvSpec):
        num += CONV_OPERATIONS
    elif isinstance(layer.state, MambaSpec):
        num += MAMBA_OPERATIONS
    elif isinstance(layer.state, Mamba1Spec):
        num += MAMBA1_OPERATIONS
    elif isinstance(layer.state, LightningSpec):
        num += LIGHTNING_OPERATIONS
    elif layer.state is not None:
        num += DELTA_OPERATIONS
    if layer.mlp is not None:
        num += MLP_OPERATIONS
    return num


def _count(decoder: DecoderSpec, layer: LayerSpec, found: Counter[str]) -> None:
    """Add the passes of a layer."""
    norms = layer.norms
    has_mixer = layer.attends or layer.state is not None
    num_parts = has_mixer + (layer.mlp is not None)
    num_before = {
        NormPosition.POST: 0,
        NormPosition.PARALLEL: 1,
    }.get(norms, num_parts)
    if layer.attends and layer.state is not None:
        found["norms of two mixers"] += 1
    if decoder.norm.has_mean and num_before:
        found["norms by mean and deviation"] += num_before
    elif norms is NormPosition.STREAM:
        found["norms that go on beside the parts"] += num_before
    elif norms.is_parallel:
        found["norms of parts side by side"] += num_before
    if norms in (NormPosition.POST, NormPosition.BOTH):
        found["norms after attention and feed-forward part"] += num_parts
    if isinstance(layer.mlp, MoeSpec) and layer.mlp.dense_size:
        found["norms of experts and of the part beside them"] += 3
    if isinstance(layer.state, Mamba1Spec) and layer.state.norm_eps:
        found["norms inside Mamba"] += len(layer.state.inner_sizes)
    if layer.attends and layer.attention.qk_norm is QkNorm.ALL_HEADS:
        found["norms of whole queries and keys"] += 2
    if layer.attends and layer.attention.qk_norm is QkNorm.ROTATED_HEAD:
        found["rotations before norms of heads"] += 1
