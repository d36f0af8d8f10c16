"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from weft.models.layers.weight import MatrixRows, RowRun, Weight, Weights
from weft.ops.codes import CodeFormat, Codes
from weft.ops.protocol import Divided, Matrix, Ops, Shard

GATE_UP = ("gate", "up")
OUTPUTS = Shard(Divided.OUTPUTS)
INPUTS = Shard(Divided.INPUTS)


class Projections:
    """The weights of several projections of the same input, stored as one matrix: x is read once,
    by one kernel.

    `parts` maps the name of each projection in the checkpoint to its output size.
    """

    def __init__(
        self,
        in_size: int,
        parts: Mapping[str, int],
        bias: bool,
        ops: Ops,
        *,
        gated: bool = False,
        precise: bool = False,
        shard: Shard | None = None,
    ) -> None:
        self.names = tuple(parts)
        self.in_size = in_size
        self.bias = bias
        sizes = tuple(parts.values())
        self.matrix: Matrix = ops.matrix(
            in_size,
            sizes,
            bias=bias,
            gated=gated,
            precise=precise,
            shard=shard,
        )

    def weights(self, prefix: str) -> Weights:
        for part, (name, size) in enumerate(zip(self.names, self.matrix.sizes, strict=True)):
            yield Weight(
                name=f"{prefix}.{name}.weight",
                shape=(size, self.in_size),
                put=partial(self.matrix.put, part),
                get=partial(self.matrix.get, part),
                keep_as=partial(self.matrix.keep_as, part),
                put_codes=partial(self.matrix.put_codes, part),
                rows=MatrixRows(self.matrix, (RowRun(part, 0, 0, size),)),
            )
            if self.bias:
                yield bias_weight(f"{prefix}.{name}.bias", self.matrix, part)


class Linear(Projections):
    """W x + b for each projection."""

    def __init__(
        self,
        in_size: int,
        parts: Mapping[str, int],
        bias: bool,
        ops: Ops,
        *,
        precise: bool = False,
        shard: Shard | None = None,
    ) -> None:
        super().__init__(in_size, parts, bias, ops, precise=precise, shard=shard)
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_size] -> [T, sum of sizes]"""
        return self._ops.linear(x, self.matrix)


class HeadwiseLinear(Linear):
    """Several projections that a checkpoint holds in one tensor, by heads: each projection's rows
    of the first head, then those of the next head."""

    def __init__(
        self,
        in_size: int,
        name: str,
        sizes: tuple[int, ...],
        num_heads: int,
        bias: bool,
        ops: Ops,
        *,
        precise: bool = False,
        shard: Shard | None = None,
    ) -> None:
        parts = {str(part): size for part, size in enumerate(sizes)}
        super().__init__(in_size, parts, bias, ops, precise=precise, shard=shard)
        self._name = name
        self._runs = headwise_runs(sizes, num_heads)

    def weights(self, prefix: str) -> Weights:
        name = f"{prefix}.{self._name}"
        yield stacked(f"{name}.weight", self.matrix, self.in_size, self._runs)
        if self.bias:
            yield stacked_bias(f"{name}.bias", self.matrix, self._runs)


class GatedLinear(Projections):
    """activation(gate) * up, for two projections of size `size`. `names` are the names of gate and
    up, or of one tensor that holds both."""

    def __init__(
        self,
        in_size: int,
        names: tuple[str, ...],
        size: int,
        bias: bool,
        ops: Ops,
        *,
        activation: str = "silu",
    ) -> None:
        # Two parts even if a checkpoint has one tensor: the kernel reads gate and up of the same
        # output together, so the matrix has to know both.
        super().__init__(
            in_size,
            dict.fromkeys(GATE_UP, size),
            bias,
            ops,
            gated=True,
            shard=OUTPUTS,
        )
        self.names = names
        self._ops = ops
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_size] -> [T, size]"""
        return self._ops.gated(x, self.matrix, self._activation)

    def weights(self, prefix: str) -> Weights:
        if len(self.names) > 1:
            yield from super().weights(prefix)
            return
        runs = stacked_runs(self.matrix.sizes)
        name = f"{prefix}.{self.names[0]}"
        yield stacked(f"{name}.weight", self.matrix, self.in_size, runs)
        if self.bias:
            yield stacked_bias(f"{name}.bias", self.matrix, runs)


def stacked_runs(sizes: Sequence[int]) -> list[RowRun]:
    """All rows of the first part, then those of the second, ..."""
    return headwise_runs(sizes, 1)


def headwise_runs(sizes: Sequence[int], num_heads: int) -> list[RowRun]:
    """Each part's rows of the first head, then of the second, ..."""
    runs = []
    begin = 0
    for head in range(num_heads):
        for part, size in enumerate(sizes):
            num_rows = size // num_heads
            runs.append(RowRun(part, head * num_rows, begin, num_rows))
            begin += num_rows
    return runs


def stacked(
    name: str,
    matrix: Matrix,
    in_size: int,
    runs: Sequence[RowRun],
) -> Weight:
    """One tensor that holds whole parts of a matrix. `runs` give the rows of each part in it."""
    num_rows = sum(run.size for run in runs)

    def pieces(start: int, stop: int) -> Iterator[tuple[RowRun, slice]]:
        """The pieces of runs within rows start..stop of the tensor: each as a run, with its rows
        relative to `start`."""
        for run in runs:
            first = max(start - run.begin, 0)
            last = min(stop - run.begin, run.size)
            if first < last:
                begin = run.begin + first
                there = slice(begin - start, run.begin + last - start)
                yield RowRun(run.part, run.first + first, begin, last - first), there

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        # A piece of the tensor may end inside a run, or hold rows of several.
        for run, rows in pieces(start, start + len(content)):
            matrix.put(
                run.part,
                content[rows],
                run.first,
                None if scales is None else scales[rows],
            )

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        stop = num_rows if stop is None else stop
        found = []
        for run, _ in pieces(start, stop):
            found.append(matrix.get(run.part, run.first, run.first + run.size))
        return torch.cat(found)

    def keep_as(format: CodeFormat, order: Tensor | None = None) -> None:
        for part in _parts(runs):
            matrix.keep_as(part, format, order)

    def put_codes(codes: Codes, start: int = 0) -> None:
        for run, rows in pieces(start, start + len(codes.values)):
            matrix.put_codes(run.part, codes.of(rows), run.first)

    return Weight(
        name,
        (num_rows, in_size),
        put,
        get,
        keep_as,
        put_codes,
        rows=MatrixRows(matrix, tuple(runs)),
    )


def stacked_bias(name: str, matrix: Matrix, runs: Sequence[RowRun]) -> Weight:
    """The bias of such a tensor. It is read and written as a whole."""

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        assert start == 0
        assert scales is None
        for part in _parts(runs):
            mine = [run for run in runs if run.part == part]
            mine.sort(key=lambda run: run.first)
            pieces = [content[run.begin : run.begin + run.size] for run in mine]
            matrix.put_bias(part, torch.cat(pieces))

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        parts = {part: matrix.get_bias(part) for part in _parts(runs)}
        found = [parts[run.part][run.first : run.first + run.size] for run in runs]
        return torch.cat(found)[start:stop]

    return Weight(
        name,
        (sum(run.size for run in runs),),
        put,
        get,
    )


def _parts(runs: Sequence[RowRun]) -> list[int]:
    return sorted({run.part for run in runs})


def bias_weight(
    name: str,
    matrix: Matrix,
    part: int,
) -> Weight:
    """The bias of one part of a matrix. It is read and written as a whole."""

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        # Checkpoints quantise only matrices, and a loader cuts only matrices into pieces.
        assert start == 0
        assert scales is None
        matrix.put_bias(part, content)

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        return matrix.get_bias(part)[start:stop]

    return Weight(
        name,
        (matrix.sizes[part],),
        put,
        get,
    )
