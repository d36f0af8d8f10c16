"""A GPU that is the CPU, and late: what is copied to pinned memory is poison until an event behind
the copy has been waited for, and a pinned buffer that is written before its copy is known to be
through is found out. Graphs are what CUDA's are: operations with addresses, recorded once, in which
every number from the host is what it was then."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.arrays import IntArray
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.executor.backend import AttentionBatch, StepSize
from weft.executor.gpu.build import GpuKernels
from weft.executor.gpu.layout import StepLayout, Tiling
from weft.executor.kv_pool import KVPool
from weft.models.layers.attention import Heads
from weft.ops.plain import PlainOps
from weft.ops.sampling import (
    SampledTokens,
    SamplerOps,
    SamplingArrays,
    TorchSamplerOps,
    UploadedSampling,
)

POISON = 0x5A


class TooEarly(Exception):
    """Memory was written while a copy from it was under way."""


class Copy(NamedTuple):
    source: Tensor
    target: Tensor
    content: Tensor
    to_host: bool


class FakeEvent:
    def __init__(self, gpu: FakeGpu, place: int) -> None:
        self._gpu = gpu
        self._place = place

    def query(self) -> bool:
        return self._gpu.num_through >= self._place

    def synchronize(self) -> None:
        self._gpu.run_to(self._place)


class FakeGpu:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_copies = self.num_through = self.num_replays = self.num_synchronized = 0
        self.sizes: list[int] = []  # of captured graphs, by the rows of what they return last
        self._copies: list[Copy] = []  # that the stream has not come to
        self._pinned: list[Tensor] = []
        self._is_entered = False

    @contextmanager
    def stream(self) -> Iterator[None]:
        before, self._is_entered = self._is_entered, True
        yield
        self._is_entered = before

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._pinned.append(_poisoned(torch.empty(shape, dtype=dtype)))
        return self._pinned[-1]

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert self._is_entered, "a copy beside the stream"
        to_host = self._is_pinned(target)
        from_host = self._is_pinned(source)
        assert to_host != from_host, "one side is pinned, the other on the device"
        content = source.clone()
        if to_host:
            _poisoned(target)
        else:
            target.copy_(content)
        self._copies.append(Copy(source, target, content, to_host))
        self.num_copies += 1

    def record(self) -> FakeEvent:
        assert self._is_entered
        return FakeEvent(self, self.num_copies)

    def capture(self, work: Callable[[], Any]) -> tuple[FakeGraph, Any]:
        assert self._is_entered
        assert not gc.isenabled(), "what is collected now is freed while the stream is captured"
        recorder = Recorder(self._is_pinned)
        with recorder:
            result = work()
        self.sizes.append(len(result[-1]))
        return FakeGraph(self, recorder.calls), result

    def synchronize(self) -> None:
        self.num_synchronized += 1
        self.run_to(self.num_copies)

    def run_to(self, place: int) -> None:
        """Let the stream come to the place behind so many copies."""
        while self.num_through < place:
            self.num_through += 1
            copy = self._copies.pop(0)
            if copy.to_host:
                copy.target.copy_(copy.content)
            elif not torch.equal(copy.source, copy.content):
                raise TooEarly

    def _is_pinned(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(storage == pinned.untyped_storage().data_ptr() for pinned in self._pinned)


WAITING = {  # operations whose result has a size, or goes to the host, so that a GPU must be waited for
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
OF_THE_HOST = {"lift_fresh", "_pin_memory"}  # a tensor of numbers of Python or numpy; pinned memory


class Recorder(TorchDispatchMode):
    """Refuses what a stream that is being captured refuses, and whatever would be wrong when it is
    replayed."""

    def __init__(self, pinned: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._is_pinned = pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        assert name not in WAITING, f"{name}: the host waits for the device in a graph"
        assert name not in OF_THE_HOST, f"{name}: a tensor of the host in a graph"
        unsized = func is torch.ops.aten.repeat_interleave.Tensor and not kwargs.get("output_size")
        assert not unsized, "a size that only the device knows, in a graph"
        indices = args[1] if name in ("index", "index_put_") else []
        masks = [index for index in indices if index is not None and index.dtype == torch.bool]
        assert not masks, f"{name} by a mask: the host waits for the device in a graph"
        given = [*_tensors(args), *_tensors(list(kwargs.values()))]
        assert not any(map(self._is_pinned, given)), f"{name}: pinned memory in a graph"
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


class FakeGraph:
    def __init__(self, gpu: FakeGpu, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        self._gpu = gpu
        self._calls = calls

    def replay(self) -> None:
        self._gpu.num_replays += 1
        for func, args, kwargs, before in self._calls:
            now = func(*args, **kwargs)
            for old, new in zip(_tensors(before), _tensors(now), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class LaidOutTorch:
    """Attention that reads nothing but `AttentionBatch.layout`, in torch, with no shape that
    depends on a number."""

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        self.tiling = Tiling(config.num_heads, config.num_kv_heads, 4, 2)
        self._config = config
        self._pool = pool
        self._layout: StepLayout | Any = None
        self._table = torch.empty(0)

    def prepare(self, batch: AttentionBatch) -> None:
        assert batch.layout is not None
        self._layout, self._table = StepLayout(*batch.layout.arrays), batch.table  # type: ignore[arg-type]

    def expect(self, starts: IntArray, lens: IntArray, size: StepSize) -> None:
        assert len(starts) == len(lens) <= size.num_requests

    def narrow(self, x: Tensor) -> Tensor:
        return x

    def forward(self, qkv: Tensor, heads: Heads, layer: int) -> Tensor:
        config = self._config
        layout = self._layout
        sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = qkv.view(len(qkv), -1, config.head_dim).split_with_sizes(sizes, 1)
        assert heads.rope is not None
        q, k = heads.prepare(q, k, heads.rope.tables(layout.positions, qkv.dtype))
        keys = self._pool.k[layer]
        values = self._pool.v[layer]
        for cache, new in ((keys, k), (values, v)):
            self._store(cache, new)
        tokens = torch.arange(len(qkv))
        request = torch.searchsorted(layout.q_indptr[1:].long(), tokens, right=True).clamp_(
            max=len(layout.rows) - 1
        )
        slots = self._table[layout.rows[request].long()].long().clamp_(min=0)  # [T, context]
        group = config.num_heads // config.num_kv_heads
        seen, said = (
            cache[slots].repeat_interleave(group, dim=2) for cache in (keys, values)
        )  # [T, context, heads, D]
        scores = torch.einsum("thd,tchd->thc", q, seen) / config.head_dim**0.5
        hidden = torch.arange(slots.shape[1]) > layout.positions[:, None]
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        said = said.masked_fill(hidden[:, :, None, None], 0)
        return torch.einsum("thc,tchd->thd", weights, said).flatten(1)

    def _store(self, cache: Tensor, new: Tensor) -> None:
        """What is padding does what the first token does once more."""
        slots = self._layout.out_slots
        real = slots >= 0
        new = torch.where(real[:, None, None], new, torch.where(real[0], new[:1], cache[:1]))
        cache.index_copy_(0, torch.where(real, slots, slots[0].clamp(min=0)).long(), new)


class StagedSamplerOps(TorchSamplerOps):
    """Believes nothing but what the device was told of the draws. `knows_better`: steps are planned
    before drafts are compared."""

    def __init__(self, *, knows_better: bool) -> None:
        self.knows_better = knows_better

    def tokens(self, logits: Tensor, draws: SamplingArrays) -> SampledTokens:
        if not draws.temperature.any():
            return super().tokens(logits, draws)
        assert isinstance(draws, UploadedSampling)
        told = draws.device
        known = torch.from_numpy(_keys(draws))
        # The device alone knows where the first token behind drafts stands.
        assert self.knows_better or torch.equal(told.keys, known)
        columns = (column.numpy() for column in told[:4])
        temperature, top_k, top_p, min_p = columns
        return super().tokens(
            logits,
            UploadedSampling(temperature, top_k, top_p, min_p, draws.seeds, draws.positions, told),
        )


def fake_kernels(
    engine: EngineConfig, config: ModelConfig, pool: KVPool, context_length: int
) -> GpuKernels:
    attention = LaidOutTorch(config, pool)
    knows_better = bool(engine.overlap) and engine.speculative not in ("off", "auto")
    sampler: SamplerOps = StagedSamplerOps(knows_better=knows_better)
    ops = PlainOps(getattr(torch, config.dtype), FakeGpu.device)
    return GpuKernels(ops, attention, sampler)


def _keys(draws: SamplingArrays) -> Any:
    from weft.ops.noise import row_keys

    return row_keys(draws.seeds, draws.positions)


def _poisoned(tensor: Tensor) -> Tensor:
    tensor.view(-1).view(torch.uint8).fill_(POISON)
    return tensor


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return (
        [one for item in result for one in _tensors(item)]
        if isinstance(result, tuple | list)
        else []
    )
