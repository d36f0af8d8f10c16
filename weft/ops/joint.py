"""What several processes that share a model compute together, in torch: the specification of
`cpp/joint.py`. Each placement (`placement.py`) needs one kind of connection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.expert_parallel import ExpertExchange
from weft.ops.routing import Routed
from weft.ops.sharding import Collective
from weft.ops.stages import Pipe


@dataclass(frozen=True)
class TorchJoint:
    """The joint operations of this process, on its connections to others."""

    ranks: Collective | None = None  # that have other parts of divided weights
    peers: ExpertExchange | None = None  # that have other experts
    pipe: Pipe | None = None  # to the stages before and after this one

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, computed in float32, in the type of x."""
        assert self.ranks is not None
        total = x.float().contiguous()
        self.ranks.all_reduce(total)
        return total.to(x.dtype)

    def gather(self, x: Tensor, size: int) -> Tensor | None:
        """On rank 0, the columns x [S, part] of all ranks, [S, size]; None on other ranks."""
        assert self.ranks is not None
        found = self.ranks.gather(x)
        if found is None:
            return None
        # [ranks, S, part] -> [S, size], without the padding of the last parts
        by_row = found.transpose(0, 1).reshape(len(x), -1)
        return by_row[:, :size].contiguous()

    def experts(self, layer: int, x: Tensor, routed: Routed, size: int) -> Tensor:
        """`Ops.experts` with experts of all peers, whose outputs have this size: [T, size]."""
        assert self.peers is not None
        num_tokens, num_chosen = routed.experts.shape
        out = torch.empty(num_tokens * num_chosen, size)
        self.peers.exchange(layer, x.float(), routed.experts, out)
        each = out.view(num_tokens, num_chosen, -1)
        return (each * routed.weights[..., None]).sum(1).to(x.dtype)

    def take(self, num_tokens: int, size: int, dtype: torch.dtype) -> Tensor:
        """`Ops.take`"""
        assert self.pipe is not None
        x = torch.empty(num_tokens, size)
        self.pipe.take(x)
        return x.to(dtype)

    def give(self, x: Tensor) -> None:
        """`Ops.give`"""
        assert self.pipe is not None
        self.pipe.give(x.float().contiguous())


ALONE = TorchJoint()
