"""Pipeline parallelism (`--pp-size`): processes, called stages, compute the layers one after the
other. This module has the places of stages, and the handover of activations between them.

    stage 0   embedding, layers 0 .. 7  ─ activations of the tokens ─▶
    stage 1                                layers 8 .. 15, head, sampling

Each stage has all names of the model's tensors, and stores the content of its own layers only. So
code that reads or changes weights finds the same names on each stage as in a single process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.ops.codes import CodeFormat, Codes
from weft.ops.fusion import tensor_of
from weft.ops.lora import NO_TABLES, AdapterOps, LoraParts, LoraTables, PutAdapter
from weft.ops.plain import PlainOps
from weft.ops.protocol import Matrix, Ops, Shard


class StagePlace(NamedTuple):
    """The place of this process among the stages."""

    stage: int  # 0..size-1
    size: int

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.size - 1

    def layers(self, num_layers: int) -> range:
        """The layers of this stage. If they cannot be divided evenly, later stages have one layer
        fewer, because the last one also has the head."""
        least, more = divmod(num_layers, self.size)
        first = self.stage * least + min(self.stage, more)
        return range(first, first + least + (self.stage < more))


class Pipe(Protocol):
    """The connection between one stage and the next."""

    def give(self, x: Tensor) -> None:
        """Send x, float32 and contiguous. Raises RankLost."""
        ...

    def take(self, x: Tensor) -> None:
        """Receive into x what the stage before has sent. Raises RankLost."""
        ...


class Handover(Protocol):
    """The first and the last operation of a stage, for one kind of `Ops`."""

    def take(self, num_tokens: int, size: int) -> Tensor:
        """The activations of the step's tokens from the stage before: [num_tokens, size]."""
        ...

    def give(self, x: Tensor) -> Tensor:
        """Send x [T, size] to the next stage. Returns x."""
        ...


class PlainHandover:
    """`Handover` in torch, with activations of `dtype`: the specification of `cpp/staged.py`."""

    def __init__(self, ops: Ops, pipe: Pipe, dtype: torch.dtype) -> None:
        self._ops = ops
        self._pipe = pipe
        self._dtype = dtype

    def take(self, num_tokens: int, size: int) -> Tensor:
        x = torch.empty(num_tokens, size)
        self._pipe.take(x)
        return x.to(self._dtype)

    def give(self, x: Tensor) -> Tensor:
        x = self._ops.computed(x)
        self._pipe.give(tensor_of(x).float().contiguous())
        return x


class AbsentMatrix:
    """A `Matrix` of another stage: accepts content and discards it."""

    tensors: Sequence[Tensor] = ()

    def __init__(self, in_size: int, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._in_size = in_size

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


class AbsentOps(PlainOps):
    """Makes the weights of layers that another stage computes. Vectors are small, so they are
    stored here as well."""

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.device("cpu"))

    def matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        precise: bool = False,
        shard: Shard | None = None,
    ) -> Matrix:
        return AbsentMatrix(in_size, sizes)

    def exact_matrix(self, in_size: int, size: int, *, bias: bool = False) -> Matrix:
        return AbsentMatrix(in_size, (size,))

    def expert_matrix(
        self,
        num_experts: int,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        shard: Shard | None = None,
    ) -> Matrix:
        return AbsentMatrix(in_size, sizes * num_experts)


class PresentAdapters:
    """The `AdapterOps` of one stage: adapters of the matrices that the stage has."""

    def __init__(self, adapters: AdapterOps) -> None:
        self.dtype = adapters.dtype
        self._adapters = adapters

    def watch(self, matrices: Sequence[Matrix], tables: Sequence[Matrix] = ()) -> None:
        self._adapters.watch(_present(matrices), _present(tables))

    def prepare(self, parts: LoraParts, tables: LoraTables = NO_TABLES) -> PutAdapter:
        of_matrices = {matrix: parts[matrix] for matrix in _present(parts)}
        of_tables = {table: tables[table] for table in _present(tables)}
        return self._adapters.prepare(of_matrices, of_tables)

    def clear(self, place: int) -> None:
        self._adapters.clear(place)

    def begin(self, adapters: IntArray | None, sampled: IntArray | None = None) -> None:
        self._adapters.begin(adapters, sampled)


def _present(matrices: Iterable[Matrix]) -> list[Matrix]:
    return [matrix for matrix in matrices if not isinstance(matrix, AbsentMatrix)]
