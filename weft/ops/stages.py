"""Pipeline parallelism (`--pp-size`): processes, called stages, compute the layers one after the
other.

    stage 0   embedding, layers 0 .. 7  ─ activations of the tokens ─▶
    stage 1                                layers 8 .. 15, head, sampling

Each stage has all names of the model's tensors, and stores the content of its own layers only. So
code that reads or changes weights finds the same names on each stage as in a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.ops.codes import CodeFormat, Codes
from weft.ops.lora import LoraPart
from weft.ops.placement import MakeExperts, MakeMatrix, PlacedMatrix, Placement
from weft.ops.protocol import LayerRange, Matrix, Shard


class PpStage(NamedTuple):
    """This process among the stages."""

    rank: int  # 0..size-1
    size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def layers(self, num_layers: int) -> range:
        """The layers of this stage. If they cannot be divided evenly, later stages have one layer
        fewer, because the last one also has the head."""
        least, more = divmod(num_layers, self.size)
        first = self.rank * least + min(self.rank, more)
        return range(first, first + least + (self.rank < more))


class Pipe(Protocol):
    """The connection between one stage and the next."""

    def give(self, x: Tensor) -> None:
        """Send x, float32 and contiguous. Raises RankLost."""
        ...

    def take(self, x: Tensor) -> None:
        """Receive into x what the stage before has sent. Raises RankLost."""
        ...


class Staged(Placement):
    """The layers of one stage."""

    def __init__(self, pp_stage: PpStage) -> None:
        self._pp_stage = pp_stage

    @property
    def part(self) -> tuple[str | int, ...]:
        return ("staged", *self._pp_stage)

    def layer_range(self, num_layers: int) -> LayerRange:
        pp_stage = self._pp_stage
        return LayerRange(pp_stage.layers(num_layers), pp_stage.is_first, pp_stage.is_last)


class Absent(Placement):
    """Nothing but vectors, which are small: for the layers of other stages."""

    def matrix(
        self,
        make: MakeMatrix,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        shard: Shard | None,
    ) -> Matrix:
        return AbsentMatrix(in_size, sizes)

    def expert_matrix(
        self,
        make: MakeExperts,
        num_experts: int,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        shard: Shard | None,
    ) -> Matrix:
        return AbsentMatrix(in_size, sizes * num_experts)


class AbsentMatrix(PlacedMatrix):
    """A matrix of another stage: accepts content and discards it."""

    local = None

    def __init__(self, in_size: int, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._in_size = in_size

    def adapted(self, parts: Sequence[LoraPart | None]) -> Sequence[LoraPart | None]:
        return ()

    def adapted_rows(self, part: LoraPart) -> LoraPart:
        raise AssertionError("another stage has the table")

    def put(
        self,
        part: int,
        rows: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        pass

    def keep_as(self, part: int, format: CodeFormat, order: Tensor | None = None) -> None:
        pass

    def put_codes(self, part: int, codes: Codes, start: int = 0) -> None:
        pass

    def get(self, part: int, start: int = 0, stop: int | None = None) -> Tensor:
        """NaN, because another stage has the values."""
        num_rows = len(range(self.sizes[part])[start:stop])
        return torch.full((num_rows, self._in_size), torch.nan)

    def put_bias(self, part: int, values: Tensor) -> None:
        pass

    def get_bias(self, part: int) -> Tensor:
        return torch.full((self.sizes[part],), torch.nan)
