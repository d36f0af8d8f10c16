"""Expert parallelism: each of several processes, called peers, has some of the experts and all
other weights of the model, and computes its own steps.

    tokens of peer 0 ─▶ routed ─┬─▶ experts of peer 0 ─┬─▶ weighted sum ─▶ tokens of peer 0
    tokens of peer 1 ─▶ routed ─┴─▶ experts of peer 1 ─┴─▶ weighted sum ─▶ tokens of peer 1

A peer returns the unweighted outputs of its experts, and the peer that has the token adds them up.
So the result of a token has the same bits as in a single process.

Source: GShard, arXiv:2006.16668, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.ops.codes import CodeFormat, Codes
from weft.ops.lora import LoraPart
from weft.ops.placement import MakeExperts, PlacedMatrix, Placement
from weft.ops.protocol import Experts, Matrix, Shard


class PeerRank(NamedTuple):
    """This process among the peers."""

    rank: int  # 0..size-1
    size: int


class ExpertRange(NamedTuple):
    """Consecutive experts: those of one peer."""

    first: int
    size: int


def experts_of(num_experts: int, peer: PeerRank) -> ExpertRange:
    """The experts of a peer. The numbers of two peers differ by at most one."""
    first = num_experts * peer.rank // peer.size
    end = num_experts * (peer.rank + 1) // peer.size
    return ExpertRange(first, end - first)


class ComputeExperts(Protocol):
    """Computes the outputs of experts of this process."""

    def __call__(self, layer: int, x: Tensor, rows: Tensor, experts: Tensor) -> Tensor:
        """The output of expert experts[i] for row rows[i] of x: [n, hidden] float32, valid until
        the next call. Experts are numbered within this process, and layers among those that have
        experts. n > 0."""
        ...


class ExpertExchange(Protocol):
    """Lets peers compute experts for each other. All peers call it for the same layers in the same
    order. Raises RankLost if another peer does not take part."""

    def exchange(self, layer: int, x: Tensor, experts: Tensor, out: Tensor) -> None:
        """Write into `out` [T * k, hidden] float32 the outputs of experts [T, k] int32 for x
        [T, hidden], the tokens of this process. Meanwhile, this process computes its own experts
        for all peers. T may be 0."""
        ...


class OwnedExperts(PlacedMatrix):
    """The matrices of all experts; `local` has those of this peer."""

    local: Matrix

    def __init__(
        self,
        local: Matrix,
        in_size: int,
        sizes: tuple[int, ...],
        num_experts: int,
        owned: ExpertRange,
        *,
        number: int,
    ) -> None:
        """`sizes`: of the parts of one expert. `number`: the index among all matrices of experts,
        in the order in which they were made."""
        self.local = local
        self.sizes = sizes * num_experts
        self.number = number
        self._in_size = in_size
        self._first = owned.first * len(sizes)
        self._num_parts = owned.size * len(sizes)

    def adapted(self, parts: Sequence[LoraPart | None]) -> Sequence[LoraPart | None]:
        return parts[self._first : self._first + self._num_parts]

    def adapted_rows(self, part: LoraPart) -> LoraPart:
        raise AssertionError("experts are no table")

    def put(self, part: int, rows: Tensor, start: int = 0, scales: Tensor | None = None) -> None:
        if self._is_here(part):
            self.local.put(part - self._first, rows, start, scales)

    def keep_as(self, part: int, format: CodeFormat, order: Tensor | None = None) -> None:
        if self._is_here(part):
            self.local.keep_as(part - self._first, format, order)

    def put_codes(self, part: int, codes: Codes, start: int = 0) -> None:
        if self._is_here(part):
            self.local.put_codes(part - self._first, codes, start)

    def get(self, part: int, start: int = 0, stop: int | None = None) -> Tensor:
        if self._is_here(part):
            return self.local.get(part - self._first, start, stop)
        size = self.sizes[part]
        stop = size if stop is None else min(stop, size)
        return torch.full((max(stop - start, 0), self._in_size), torch.nan)

    def put_bias(self, part: int, values: Tensor) -> None:
        if self._is_here(part):
            self.local.put_bias(part - self._first, values)

    def get_bias(self, part: int) -> Tensor:
        if self._is_here(part):
            return self.local.get_bias(part - self._first)
        return torch.full((self.sizes[part],), torch.nan)

    def _is_here(self, part: int) -> bool:
        return self._first <= part < self._first + self._num_parts


class ExpertsApart(Placement):
    """Some experts of each layer, and all of the other weights. A layer makes two matrices of
    experts: first gates and ups, then downs."""

    def __init__(self, peer: PeerRank) -> None:
        self._peer = peer
        self._matrices: list[OwnedExperts] = []

    @property
    def part(self) -> tuple[str | int, ...]:
        return ("experts", *self._peer)

    def expert_matrix(
        self,
        make: MakeExperts,
        num_experts: int,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        shard: Shard | None,
    ) -> Matrix:
        owned = experts_of(num_experts, self._peer)
        local = make(owned.size, in_size, sizes, bias)
        number = len(self._matrices)
        matrix = OwnedExperts(local, in_size, sizes, num_experts, owned, number=number)
        self._matrices.append(matrix)
        return matrix

    def local(self, activations: Sequence[str]) -> list[Experts]:
        """The experts of this process, of all layers that have experts. `activations`: one per such
        layer."""
        assert len(self._matrices) == 2 * len(activations), "a layer of experts has two matrices"
        found = []
        for layer, activation in enumerate(activations):
            gate_up, down = self._matrices[2 * layer : 2 * layer + 2]
            found.append(Experts(gate_up.local, down.local, activation))
        return found


def layer_of(experts: Experts) -> int | None:
    """The index of a layer among those that have experts; None: its experts are not divided between
    peers."""
    if not isinstance(experts.down, OwnedExperts):
        return None
    return experts.down.number // 2
