"""The attention backend, and a whole model on a GPU's path, against torch: everything but the GPU
itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.executor.driver import MODEL, ints
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormKind,
    NormPosition,
    QkNorm,
    RopeConfig,
)
from weft.config.model import ModelConfig
from weft.executor.backend import AttentionBackend, AttentionBatch, DeviceLayout
from weft.executor.gpu.attention import TritonPaged
from weft.executor.kv_pool import KVPool
from weft.executor.plain.attention import TorchPaged
from weft.models.registry import make_model
from weft.ops.plain import PlainOps
from weft.ops.protocol import Ops
from weft.ops.triton.ops import TritonOps
from weft.weights.load import randomize

CPU = torch.device("cpu")
SLOTS = 300
ROWS = 6
CONTEXT = 64
SLIDING = AttentionSpec(qk_norm=QkNorm.HEAD, window=4, qkv_bias=True, out_bias=True)
FULL = replace(SLIDING, window=0)
QWEN = replace(
    MODEL,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=48,
    decoder=DecoderSpec(layers=(LayerSpec(attention=SLIDING), LayerSpec(attention=FULL))),
)
GELU = MlpSpec(activation="gelu_pytorch_tanh")
TURNED = RopeConfig(share=0.5, side_by_side=True, query_growth=0.3, original_max_position=8)
BOTH = LayerSpec(
    attention=AttentionSpec(rope=TURNED, scale=0.3, sinks=True),
    mlp=GELU,
    norms=NormPosition.BOTH,
)
POST = LayerSpec(
    attention=AttentionSpec(rope=None, qk_norm=QkNorm.ALL_HEADS, window=4, score_cap=0.5),
    norms=NormPosition.POST,
)
PARALLEL = LayerSpec(
    attention=AttentionSpec(rope=RopeConfig(side_by_side=True), gate=True),
    mlp=MlpSpec(activation="relu2", is_gated=False, bias=True),
    norms=NormPosition.PARALLEL,
    residual_scale=0.4,
)
DECODERS = {
    "norms of heads, biases, and a window in one layer of two": QWEN.decoder,
    "norms of outputs, heads that turn in part, sinks, a cap, a layer without positions": DecoderSpec(
        layers=(BOTH, POST),
        norm=NormKind.RMS_PLUS_ONE,
        embedding_scale=3.0,
        logit_cap=2.0,
    ),
    "norms with a mean, blocks side by side, gates": DecoderSpec(
        layers=(PARALLEL,),
        norm=NormKind.LAYER_BIAS,
        logit_scale=0.5,
    ),
    "norms of heads that turn in part": DecoderSpec(
        layers=(LayerSpec(attention=AttentionSpec(qk_norm=QkNorm.HEAD, rope=TURNED, gate=True)),),
    ),
}
STEPS = [  # requests: row, tokens in the cache, tokens to run
    [(0, 0, 9), (2, 0, 1)],
    [(0, 9, 1), (2, 1, 5), (1, 0, 11)],
    [(1, 11, 1), (0, 10, 1), (2, 6, 1)],
]


def run(
    config: ModelConfig, ops: Ops, attention: AttentionBackend, laid_out: bool = False
) -> list[Tensor]:
    """Logits of every token of the steps. `laid_out`: each laid out beforehand, in a size that is
    too large."""
    model = make_model(config, ops)
    randomize(model.weights())
    random = torch.Generator().manual_seed(0)
    table = torch.randperm(SLOTS, generator=random)[: ROWS * 40].view(ROWS, 40).int()
    found = []
    for step in STEPS:
        rows, starts, lens = (ints(column) for column in zip(*step, strict=True))
        positions = np.concatenate([np.arange(start, start + num) for _, start, num in step])
        slots = torch.cat([table[row, start : start + num] for row, start, num in step]).long()
        tokens = torch.randint(config.vocab_size, (len(slots),), generator=random)
        batch = AttentionBatch(rows, starts, lens, torch.from_numpy(positions), slots, table)
        num = len(tokens)
        if laid_out:
            assert isinstance(attention, TritonPaged)
            size = attention.tiling.extend_size(num + 5, 4)
            if (lens == 1).all():
                size = attention.tiling.decode_size(5)
            layout = attention.tiling.lay_out(rows, starts, lens, slots.int().numpy(), size)
            batch = replace(batch, layout=DeviceLayout(tuple(map(torch.from_numpy, layout)), size))
            tokens = torch.cat((tokens, tokens.new_zeros(size.num_tokens - num)))
        attention.prepare(batch)
        found.append(model.logits(model.forward(tokens, batch.positions, attention)[:num]))
    return found


@pytest.mark.parametrize(
    ("decoder", "laid_out"),
    [
        pytest.param(decoder, bool(number % 2), marks=[pytest.mark.slow] * (number in (1, 2)))
        for number, decoder in enumerate(DECODERS.values())
    ],
    ids=list(DECODERS),
)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of what stands in padding
def test_a_model_computes_what_it_computes_in_torch(decoder: DecoderSpec, laid_out: bool) -> None:
    config = replace(QWEN, decoder=decoder)
    pools = [KVPool(config, SLOTS, CPU, torch.float32) for _ in "ab"]
    paged = TritonPaged(config, pools[0], CONTEXT)
    ours = run(config, TritonOps(torch.float32, CPU), paged, laid_out)
    twin = run(config, PlainOps(torch.float32, CPU), TorchPaged(config, pools[1]))
    for got, want in zip(ours, twin, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def test_kv_in_a_type_that_is_not_read_is_refused() -> None:
    with pytest.raises(
        ValueError, match="int8; they can in float32, bfloat16, float16, float8_e4m3fn"
    ):
        TritonPaged(MODEL, KVPool(MODEL, SLOTS, CPU, torch.int8), CONTEXT)
