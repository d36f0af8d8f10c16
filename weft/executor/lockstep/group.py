"""The experts that several engines have between them, as one of them sees them
(`--enable-dp-attention`): rows of all go to those that have their experts, and come back computed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.arrays import IntArray
from weft.config.decoder import MoeSpec
from weft.config.lockstep import expert_specs
from weft.config.model import ModelConfig
from weft.ops.expert_parallel import ComputeExperts, PeerRank, experts_of
from weft.parallel.peers import Peers

FloatArray = NDArray[np.float32]

SENT = struct.Struct("<QQ")  # rows, and pairs of a row and an expert


class RowsOfEngine(NamedTuple):
    """The rows of one engine that another, or the engine itself, computes with its experts."""

    rows: FloatArray  # [n, hidden]
    row_of_pair: IntArray  # [pairs] a row
    experts: IntArray  # [pairs] an expert for it, by its number in the computing engine


class ExpertGroup:
    """The `ExpertExchange` of one engine: what it has of the experts, and the others."""

    def __init__(self, peers: Peers, model: ModelConfig) -> None:
        self.peers = peers
        self.peer_rank = PeerRank(peers.rank, peers.size)
        self._hidden_size = model.hidden_size
        self._specs = expert_specs(model)
        self._compute: ComputeExperts | None = None
        self._borders = [self._borders_of(spec) for spec in self._specs]

    @property
    def activations(self) -> Sequence[str]:
        """The activation function of each layer that has experts, in order of the layers."""
        return [spec.activation for spec in self._specs]

    def begin(self, compute: ComputeExperts) -> None:
        """The model is loaded: `compute` computes the experts of this engine."""
        self._compute = compute

    @torch.inference_mode()
    def idle(self) -> None:
        """Take part in a step without tokens of this engine."""
        for layer, spec in enumerate(self._specs):
            nothing = torch.empty(0, self._hidden_size)
            chosen = torch.empty(0, spec.router.num_chosen, dtype=torch.int32)
            self.exchange(layer, nothing, chosen, nothing)

    def exchange(self, layer: int, x: Tensor, experts: Tensor, out: Tensor) -> None:
        """Send rows to the engines that have their experts, and get them back computed. A row goes
        to each engine once, with all of its experts there."""
        borders = self._borders[layer]
        mine = self.peer_rank.rank
        num_chosen = experts.shape[1]
        flat = experts.reshape(-1).numpy()
        owners = np.searchsorted(borders, flat, side="right") - 1
        rows = x.numpy()
        pairs = [
            np.flatnonzero(owners == rank).astype(np.int32) for rank in range(self.peer_rank.size)
        ]
        sent = {
            rank: _packed(rows, pairs[rank] // num_chosen, flat[pairs[rank]] - borders[rank])
            for rank in self.peers.others
        }
        received = self.peers.swap(sent)
        parts = {rank: self._unpacked(data) for rank, data in received.items()}
        here = flat[pairs[mine]] - borders[mine]
        parts[mine] = RowsOfEngine(rows, pairs[mine] // num_chosen, here)
        computed = self._computed(layer, parts)
        replies = {rank: computed[rank].tobytes() for rank in self.peers.others}
        results = out.numpy()
        results[pairs[mine]] = computed[mine]
        for rank, data in self.peers.swap(replies).items():
            results[pairs[rank]] = np.frombuffer(data, np.float32).reshape(-1, self._hidden_size)

    def _computed(self, layer: int, parts: dict[int, RowsOfEngine]) -> dict[int, FloatArray]:
        """The outputs of this engine's experts for the rows of all engines, separate by sender."""
        assert self._compute is not None, "a step before the model is there"
        order = sorted(parts)
        firsts = np.cumsum([0, *(len(parts[rank].rows) for rank in order)])
        row_of_pair = [
            parts[rank].row_of_pair + first for rank, first in zip(order, firsts, strict=False)
        ]
        which = np.concatenate(row_of_pair).astype(np.int32)
        if not len(which):
            return {rank: np.empty((0, self._hidden_size), np.float32) for rank in order}
        rows = np.concatenate([parts[rank].rows for rank in order])
        chosen = np.concatenate([parts[rank].experts for rank in order]).astype(np.int32)
        found = self._compute(
            layer, torch.from_numpy(rows), torch.from_numpy(which), torch.from_numpy(chosen)
        ).numpy()
        ends = np.cumsum([0, *map(len, row_of_pair)])
        return {
            rank: found[begin:end] for rank, (begin, end) in zip(order, pairwise(ends), strict=True)
        }

    def _unpacked(self, data: bytearray) -> RowsOfEngine:
        num_rows, num_pairs = SENT.unpack_from(data)
        numbers = np.frombuffer(data, np.int32, 2 * num_pairs, SENT.size)
        begin = SENT.size + numbers.nbytes
        rows = np.frombuffer(data, np.float32, num_rows * self._hidden_size, begin)
        rows = rows.reshape(num_rows, self._hidden_size)
        return RowsOfEngine(rows, numbers[:num_pairs], numbers[num_pairs:])

    def _borders_of(self, spec: MoeSpec) -> IntArray:
        """The first expert of each engine."""
        engines = [PeerRank(rank, self.peer_rank.size) for rank in range(self.peer_rank.size)]
        firsts = [experts_of(spec.router.num_experts, engine).first for engine in engines]
        return np.array(firsts, np.int32)


def _packed(rows: FloatArray, row_of_pair: IntArray, experts: IntArray) -> bytes:
    """Rows to send, each once, and for each pair the index of its row among them."""
    wanted, of_pair = np.unique(row_of_pair, return_inverse=True)
    numbers = np.concatenate([of_pair, experts]).astype(np.int32)
    head = SENT.pack(len(wanted), len(row_of_pair))
    return head + numbers.tobytes() + np.ascontiguousarray(rows[wanted]).tobytes()
