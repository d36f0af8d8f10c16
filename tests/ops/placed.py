"""A small decoder in several processes, which are threads here, on any device."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tests.executor.driver import MODEL
from weft.config.decoder import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec, RouterSpec
from weft.models.decoder import Decoder
from weft.models.layers.attention import Heads
from weft.ops.expert_parallel import ComputeExperts, ExpertsApart, PeerRank, experts_of
from weft.ops.placement import UNSPLIT, Placement
from weft.ops.protocol import Ops
from weft.ops.sharding import Collective, GroupRank, Sharded
from weft.ops.stages import Pipe, PpStage, Staged

WAIT_S = 60.0  # for a thread of this process; never waited for
LAYERS = (
    LayerSpec(attention=AttentionSpec(qkv_bias=True, sinks=True)),
    LayerSpec(
        mlp=MoeSpec(
            router=RouterSpec(num_experts=5, num_chosen=2),
            size=64,
            bias=True,
        ),
        residual_scale=0.5,
    ),
)
CONFIG = replace(
    MODEL,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=64,
    decoder=DecoderSpec(layers=LAYERS, head_bias=True),
)
TOKENS = torch.tensor([3, 60, 0, 31, 17, 30, 45])


# Held by the process that computes; a process that waits for others lets go of it. Triton's
# interpreter and torch's settings are not made for several threads.
COMPUTES = threading.Lock()


class Waiting:
    """While a process waits for others, they compute."""

    def __enter__(self) -> None:
        COMPUTES.release()

    def __exit__(self, *_: object) -> None:
        COMPUTES.acquire()


class QueriesOnly:
    """A `PagedAttention` whose output is its queries: it keeps nothing."""

    def __init__(self, num_heads: int) -> None:
        self._num_columns = num_heads * CONFIG.head_dim

    def forward(self, qkv: Tensor, heads: Heads, layer: int) -> Tensor:
        return qkv[:, : self._num_columns]

    def narrow(self, x: Tensor) -> Tensor:
        return x


class Meeting:
    """Joins ranks: each gives a tensor, and gets those of all."""

    def __init__(self, size: int) -> None:
        self._given: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=WAIT_S)

    def swap(self, rank: int, x: Tensor) -> list[Tensor]:
        self._given[rank] = x.clone()
        with Waiting():
            self._barrier.wait()
            found = list(self._given)
            self._barrier.wait()
        return found


class InMemory:
    """The `Collective` of one rank."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> None:
        given = self._meeting.swap(self.rank, x)
        total = given[0]
        for other in given[1:]:
            total = total + other
        x.copy_(total)

    def gather(self, x: Tensor) -> Tensor | None:
        given = self._meeting.swap(self.rank, x)
        return None if self.rank else torch.stack(given)

    def close(self) -> None:
        pass


class Experts:
    """The `ExpertExchange` of all peers, one of which asks at a time."""

    def __init__(self, size: int) -> None:
        self.peers: list[ComputeExperts] = []
        places = [PeerRank(rank, size) for rank in range(size)]
        self._owned = [experts_of(5, place) for place in places]

    def exchange(self, layer: int, x: Tensor, experts: Tensor, out: Tensor) -> None:
        flat = experts.flatten()
        for peer, (first, size) in zip(self.peers, self._owned, strict=True):
            (pairs,) = ((flat >= first) & (flat < first + size)).nonzero(as_tuple=True)
            rows = (pairs // experts.shape[1]).int()
            if len(pairs):
                out[pairs] = peer(layer, x, rows, (flat[pairs] - first).int())


class Queues:
    """The `Pipe` of a stage."""

    def __init__(self, before: queue.Queue[Tensor], behind: queue.Queue[Tensor]) -> None:
        self._before = before
        self._behind = behind

    def give(self, x: Tensor) -> None:
        self._behind.put(x.clone())

    def take(self, x: Tensor) -> None:
        with Waiting():
            given = self._before.get(timeout=WAIT_S)
        x.copy_(given)


class Connections(NamedTuple):
    """The connections of one process to others; one of them, or none."""

    ranks: Collective | None = None
    peers: Experts | None = None
    pipe: Pipe | None = None


class Process(NamedTuple):
    """One of the processes that share the decoder."""

    placement: Placement
    connections: Connections
    share: int = 1  # the number of processes that divide the heads


def whole() -> list[Process]:
    return [Process(UNSPLIT, Connections())]


def sharded() -> list[Process]:
    meeting = Meeting(2)
    found = []
    for rank in range(2):
        ranks = InMemory(rank, 2, meeting)
        found.append(Process(Sharded(GroupRank(rank, 2)), Connections(ranks=ranks), share=2))
    return found


def experts_apart() -> list[Process]:
    peers = Experts(3)
    return [Process(ExpertsApart(PeerRank(rank, 3)), Connections(peers=peers)) for rank in range(3)]


def staged() -> list[Process]:
    between: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(4)]
    found = []
    for stage in range(3):
        pipe = Queues(between[stage], between[stage + 1])
        found.append(Process(Staged(PpStage(stage, 3)), Connections(pipe=pipe)))
    return found


PLACEMENTS = {
    "whole": whole,
    "sharded": sharded,
    "experts apart": experts_apart,
    "staged": staged,
}


class Device(NamedTuple):
    """How one kind of device computes a decoder."""

    make_ops: Callable[[Process, int], Ops]  # of a process with this number
    make_experts: Callable[[Ops, ExpertsApart], ComputeExperts]  # of layers 1 and 3
    logits: Callable[[Ops, Decoder, QueriesOnly], Tensor | None]  # of TOKENS; not of all stages


def filled(ops: Ops) -> Decoder:
    """The decoder with the same random weights in all processes."""
    decoder = Decoder(CONFIG, ops)
    for weight in decoder.weights():
        generator = torch.Generator().manual_seed(zlib.crc32(weight.name.encode()))
        weight.put(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    return decoder


@torch.inference_mode()
def logits_of(device: Device, processes: Sequence[Process]) -> list[Tensor]:
    """The logits of TOKENS of each process that has all of them."""
    made = [device.make_ops(process, number) for number, process in enumerate(processes)]
    decoders = [filled(ops) for ops in made]
    for process, ops in zip(processes, made, strict=True):
        if isinstance(process.placement, ExpertsApart) and process.connections.peers is not None:
            compute = device.make_experts(ops, process.placement)
            process.connections.peers.peers.append(compute)

    @torch.inference_mode()
    def run(index: int) -> Tensor | None:
        attention = QueriesOnly(CONFIG.num_heads // processes[index].share)
        with COMPUTES:
            return device.logits(made[index], decoders[index], attention)

    with ThreadPoolExecutor(len(made)) as threads:
        found = list(threads.map(run, range(len(made))))
    return [one for one in found if one is not None and one.shape[1] == CONFIG.vocab_size]


def assert_same(found: Sequence[Tensor], expected: Tensor, *, is_exact: bool) -> None:
    assert found
    for one in found:
        if is_exact:
            assert torch.equal(one, expected)
        else:
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
