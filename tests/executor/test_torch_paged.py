from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.executor.driver import MODEL, ints
from weft.config.decoder import AttentionSpec, DecoderSpec, LayerSpec, RopeConfig
from weft.config.engine import EngineConfig
from weft.config.sight import Sight
from weft.executor.backend import AttentionBatch
from weft.executor.gpu.build import gpu_kernels
from weft.executor.kv_pool import KVPool
from weft.executor.plain import attention as torch_paged
from weft.executor.plain.attention import TorchPaged
from weft.models.layers.attention import Heads
from weft.models.layers.rope import Rope

CPU = torch.device("cpu")
SLOTS = 4_096
ROWS = 16
CONTEXT = 400


def attend_twin(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    window: int,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """q [n, heads, D] are the last n of the tokens of k and v [L, kv_heads, D]; all float64."""
    out = np.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        end = len(k) - len(q) + i + 1
        seen = slice(max(0, end - window) if window else 0, end)
        for head in range(q.shape[1]):
            scores = k[seen, head // group] @ q[i, head] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            total = weights.sum()
            if sinks is not None:
                total += np.exp(sinks[head] - scores.max())
            out[i, head] = weights / total @ v[seen, head // group]
    return out


class Scene:
    """Requests with random K and V in random slots; what belongs to nobody is NaN."""

    def __init__(
        self,
        starts: list[int],
        lens: list[int],
        *,
        heads: int,
        kv_heads: int,
        window: int,
        has_sinks: bool = False,
    ) -> None:
        self.config = replace(
            MODEL,
            num_layers=1,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=8,
            decoder=DecoderSpec(layers=(LayerSpec(attention=AttentionSpec(window=window)),)),
        )
        self.starts = starts
        self.lens = lens
        self.window = window
        generator = torch.Generator().manual_seed(0)
        self.pool = KVPool(self.config, SLOTS, CPU, torch.float32)
        self.pool.k[0].fill_(torch.nan)
        self.pool.v[0].fill_(torch.nan)
        table = torch.full(
            (ROWS, CONTEXT), SLOTS - 1, dtype=torch.int32
        )  # stale: somebody else's slot
        rows = torch.randperm(ROWS, generator=generator)[: len(lens)]
        free = torch.randperm(SLOTS - 1, generator=generator).to(torch.int32)
        self.sinks = torch.randn(heads, generator=generator) if has_sinks else None
        self.q = []
        self.k = []
        self.v = []
        slots = []
        for row, start, num in zip(rows, starts, lens, strict=True):
            mine, free = free[: start + num], free[start + num :]
            table[row, : start + num] = mine
            self.q.append(torch.randn(num, heads, 8, generator=generator))
            self.k.append(torch.randn(start + num, kv_heads, 8, generator=generator))
            self.v.append(torch.randn(start + num, kv_heads, 8, generator=generator))
            self.pool.k[0][mine[:start]] = self.k[-1][:start]
            self.pool.v[0][mine[:start]] = self.v[-1][:start]
            slots.append(mine[start:].long())
        slots = torch.cat(slots)
        still = torch.zeros_like(slots)  # at position 0 nothing is rotated
        self.batch = AttentionBatch(
            rows.int().numpy(), ints(starts), ints(lens), still, slots, table
        )

    def run(self) -> torch.Tensor:
        backend = TorchPaged(self.config, self.pool)
        backend.prepare(self.batch)
        new = [
            [x[start:] for x, start in zip(side, self.starts, strict=True)]
            for side in (self.k, self.v)
        ]
        qkv = torch.cat([torch.cat(self.q), torch.cat(new[0]), torch.cat(new[1])], dim=1).flatten(1)
        heads = Heads(Rope(RopeConfig(), self.config), None, None, sinks=self.sinks)
        return backend.forward(qkv, heads, 0).view(len(qkv), -1, 8)

    def expected(self) -> np.ndarray:
        sides = zip(self.q, self.k, self.v, strict=True)
        sinks = None if self.sinks is None else self.sinks.double().numpy()
        found = []
        for side in sides:
            q, k, v = (x.double().numpy() for x in side)
            found.append(attend_twin(q, k, v, self.window, sinks))
        return np.concatenate(found)


@pytest.mark.pairs
@pytest.mark.parametrize("window", [0, 5, 150])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize(
    ("starts", "lens"),
    [
        pytest.param([0, 3, 9, 10, 40, 41, 200], [1] * 7, id="decode"),
        pytest.param([0, 0, 30], [5, 33, 2], id="extend"),
        pytest.param([0, 100], [300, 260], id="several query blocks"),
        pytest.param([17, 2, 0, 5], [1, 8, 1, 1], id="mixed"),
    ],
)
def test_attention_is_that_of_the_twin(starts, lens, heads, kv_heads, window):
    scene = Scene(starts, lens, heads=heads, kv_heads=kv_heads, window=window)
    actual = scene.run()
    assert actual.shape == (*scene.batch.slots.shape, heads, 8)
    assert np.abs(actual.double().numpy() - scene.expected()).max() < 1e-5


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_sinks_join_the_sum_of_each_head(heads, kv_heads, window):
    shape = {"heads": heads, "kv_heads": kv_heads, "window": window}
    scene = Scene([17, 2, 0, 100, 30, 31], [1, 8, 1, 140, 1, 1], **shape, has_sinks=True)
    assert np.abs(scene.run().double().numpy() - scene.expected()).max() < 1e-5


def test_new_keys_and_values_are_stored_in_their_slots():
    scene = Scene([4, 0], [1, 3], heads=2, kv_heads=1, window=0)
    scene.run()
    assert torch.equal(scene.pool.k[0][scene.batch.slots], torch.cat([scene.k[0][4:], scene.k[1]]))
    assert torch.equal(scene.pool.v[0][scene.batch.slots], torch.cat([scene.v[0][4:], scene.v[1]]))


def test_a_request_that_is_not_finite_harms_no_other_in_its_group():
    scene = Scene([20, 21, 22], [1, 1, 1], heads=2, kv_heads=1, window=0)
    scene.q[1].fill_(torch.nan)
    scene.k[1].fill_(torch.nan)
    scene.v[1].fill_(torch.nan)
    bad = scene.batch.table[scene.batch.rows[1], :21].long()
    scene.pool.k[0][bad] = scene.pool.v[0][bad] = torch.nan
    actual = scene.run()
    assert actual[1].isnan().all()
    good = torch.stack((actual[0], actual[2])).double().numpy()
    assert np.abs(good - scene.expected()[[0, 2]]).max() < 1e-5


def test_groups_are_similar_in_length_and_small(monkeypatch):
    monkeypatch.setattr(
        torch_paged, "GROUP_BYTES", 4 * 8 * 100
    )  # 100 tokens of one head of 8 in float32
    scene = Scene([2, 0, 60, 61, 62, 300, 301], [1] * 7, heads=1, kv_heads=1, window=0)
    backend = TorchPaged(scene.config, scene.pool)
    backend.prepare(scene.batch)
    groups = backend._work[Sight()].groups
    assert [group.tokens.tolist() for group in groups] == [[1], [0], [2], [3], [4], [5], [6]]
    monkeypatch.undo()
    backend = TorchPaged(scene.config, scene.pool)
    backend.prepare(scene.batch)
    groups = backend._work[Sight()].groups
    assert [group.tokens.tolist() for group in groups] == [[1], [0], [2, 3, 4], [5, 6]]
    assert [len(group.slots) for group in groups] == [1, 3, 3 * 63, 2 * 302]


def test_an_unknown_backend_is_refused():
    engine = EngineConfig(attention_backend="flash")
    pool = KVPool(MODEL, 16, CPU, torch.float32)
    with pytest.raises(ValueError, match="flash: no installed package has it"):
        gpu_kernels(engine, MODEL, pool, 32)
