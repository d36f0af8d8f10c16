"""The kernels of attention alone, by batch, length and launch: how much of the memory's rate decode gets, and how much
of the tensor cores' prefill. What is fastest belongs into `weft/ops/triton/launches.py`. On a CPU torch is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from gpu_parts.kernels import MODEL, ROPE, parts, stream
from gpu_parts.part import Row, Setting
from gpu_parts.timing import seconds
from weft.config.model import ModelConfig
from weft.executor.backend import AttentionBatch
from weft.models.layers.attention import Heads
from weft.models.layers.rope import Rope

SHAPES = {"0.6b": (16, 8, 128), "8b": (32, 8, 128)}  # heads, KV heads, head dim


def findings(setting: Setting) -> Iterator[Row]:
    with stream(setting):
        yield from shapes(setting)


def shapes(setting: Setting) -> Iterator[Row]:
    for name, (heads, kv_heads, head_dim) in setting.pick(SHAPES, {"small": (4, 2, 32)}).items():
        model = replace(
            MODEL,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position=32_768,
        )
        for num, cached in setting.pick(
            ((1, 1_024), (1, 16_384), (16, 1_024), (64, 1_024), (256, 1_024)), ((2, 64),)
        ):
            yield from decode(setting, name, model, num, cached)
        for num, length in setting.pick(((8, 1_024), (1, 8_192), (64, 64)), ((1, 64),)):
            yield from extend(setting, name, model, num, length)


def decode(setting: Setting, name: str, model: ModelConfig, num: int, cached: int) -> Iterator[Row]:
    step = Step(setting, model, np.full(num, cached, np.int32), np.ones(num, np.int32))
    read = num * (cached + 1) * 2 * model.num_kv_heads * model.head_dim * 2
    for launch, taken in step.decodes():
        yield {
            "what": f"decode {name}, {num} x {cached:,}",
            **launch,
            "us": taken * 1e6,
            "gb_per_s": read / taken / 1e9,
        }


def extend(setting: Setting, name: str, model: ModelConfig, num: int, length: int) -> Iterator[Row]:
    step = Step(setting, model, np.zeros(num, np.int32), np.full(num, length, np.int32))
    flops = num * 4 * model.num_heads * model.head_dim * length * (length + 1) / 2
    for launch, taken in step.extends():
        yield {
            "what": f"extend {name}, {num} x {length:,}",
            **launch,
            "us": taken * 1e6,
            "tflops": flops / taken / 1e12,
        }


class Step:
    """One step of attention, laid out. Slots are in no order."""

    def __init__(
        self,
        setting: Setting,
        model: ModelConfig,
        starts: np.ndarray,
        lens: np.ndarray,
        backend: str = "auto",
    ) -> None:
        self._setting, self._model = setting, model
        stops = starts + lens
        self._found, self._pool = parts(setting, model, int(stops.sum()), backend=backend)
        slots_of = (
            np.random.default_rng(0)
            .permutation(int(stops.sum()))
            .astype(np.int32)
            .reshape(len(lens), -1)
        )
        slots = np.concatenate(
            [line[start:stop] for line, start, stop in zip(slots_of, starts, stops, strict=True)]
        )
        positions = np.concatenate(
            [np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
        )
        there = [
            torch.from_numpy(x.astype(np.int64)).to(setting.device) for x in (positions, slots)
        ]
        rows = np.arange(len(lens), dtype=np.int32)
        self._batch = AttentionBatch(
            rows, starts, lens, *there, torch.from_numpy(slots_of).to(setting.device)
        )
        width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        self._qkv = torch.randn(len(slots), width, device=setting.device, dtype=torch.bfloat16)
        self._heads = Heads(Rope(ROPE, model), None, None)
        self._found.attention.prepare(self._batch)

    def decodes(self) -> Iterator[tuple[dict[str, object], float]]:
        if not self._setting.on_gpu:
            yield {}, self.whole()
            return
        from weft.ops.triton.decode import decode
        from weft.ops.triton.launches import decode_launch

        step = self._found.attention._step  # type: ignore[attr-defined]
        usual = decode_launch(
            self._model.head_dim, self._model.num_heads // self._model.num_kv_heads
        )
        tried = {(step.num_splits, usual)}  # every combination is compiled: not all of them
        if len(self._batch.lens) < 64:
            tried |= {(max(1, step.num_splits // 2), usual), (min(64, 2 * step.num_splits), usual)}
        if len(self._batch.lens) == 64:
            for keys, warps, stages in (
                (64, 4, 4),
                (64, 4, 2),
                (128, 4, 3),
                (32, 2, 4),
                (64, 8, 3),
            ):
                tried.add((step.num_splits, usual._replace(keys=keys, warps=warps, stages=stages)))
        for splits, launch in sorted(tried):
            cut = step._replace(num_splits=splits)
            yield from self._timed(decode, cut, launch, {"splits": splits, **told(launch)})

    def extends(self) -> Iterator[tuple[dict[str, object], float]]:
        if not self._setting.on_gpu:
            yield {}, self.whole()
            return
        from weft.ops.triton.extend import extend
        from weft.ops.triton.launches import extend_launch

        step = self._found.attention._step  # type: ignore[attr-defined]
        usual = extend_launch(
            self._model.head_dim, self._model.num_heads // self._model.num_kv_heads
        )
        tried = {usual}
        if len(self._batch.lens) == 8:
            for keys, warps, stages in ((64, 8, 2), (128, 8, 2), (64, 4, 3), (32, 8, 4)):
                tried.add(usual._replace(keys=keys, warps=warps, stages=stages))
        for launch in sorted(tried):
            yield from self._timed(extend, step, launch, told(launch))

    def whole(self) -> float:
        return seconds(
            lambda: self._found.attention.forward(self._qkv.clone(), self._heads, 0),
            self._setting.device,
            repeats=5,
        )

    def _timed(self, kernel, step, launch, name) -> Iterator[tuple[dict[str, object], float]]:
        """Nothing for a launch that the GPU has not the shared memory or registers for."""
        model, kv = self._model, self._found.attention._kv[0]  # type: ignore[attr-defined]
        q = self._qkv.view(len(self._qkv), -1, model.head_dim)[:, : model.num_heads]
        out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        try:
            yield (
                name,
                seconds(
                    lambda: kernel(q, kv, step, out, model.head_dim**-0.5, 0, launch),
                    "cuda",
                    repeats=10,
                ),
            )
        except Exception as exc:
            if "out of resource" not in str(exc):
                raise


def told(launch) -> dict[str, object]:
    return {"keys": launch.keys, "warps": launch.warps, "stages": launch.stages}
