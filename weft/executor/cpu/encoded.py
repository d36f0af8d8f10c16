"""Attention to what the encoder has read for each request, by the CPU kernels. `attend` records;
the recorded program runs on the step of `CppPaged`, which has the rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from weft.arrays import IntArray
from weft.executor.kv_pool import EncodedPool
from weft.executor.plain.encoded import weights_of
from weft.ops.cpp import abi
from weft.ops.cpp.ops import CppOps


class CppEncoded:
    """The `EncodedKv` for recorded programs."""

    def __init__(self, pool: EncodedPool, ops: CppOps) -> None:
        padded = pool.keys[0].shape[-1]
        assert pool.num_positions <= abi.MAX_CROSS, "more positions than the kernels keep"
        assert padded % abi.CROSS_STEP == 0, "positions that the kernels cannot read"
        self._pool = pool
        self.width = pool.width
        self._ops = ops
        # Queries of the last step, by layer: [capacity, heads * head_dim]. As long as they are
        # here, the program writes nothing else there.
        self._queries: dict[int, Tensor] = {}

    def write(self, row: int, vectors: Tensor) -> None:
        assert vectors.shape == (self._pool.num_positions, self.width), "not a row's vectors"
        _, heads, head_dim, padded = self._pool.keys[0].shape
        layers = vectors.chunk(len(self._pool.keys), dim=1)
        for rows, keys, values in zip(layers, self._pool.keys, self._pool.values, strict=True):
            args = abi.WriteEncodedArgs(
                rows=rows.data_ptr(),
                stride=rows.stride(0),
                keys=keys[row].data_ptr(),
                values=values[row].data_ptr(),
                heads=heads,
                head_dim=head_dim,
                num_positions=self._pool.num_positions,
                padded=padded,
            )
            self._ops.library.run_one(args, abi.StepArgs())

    def prepare(self, rows: IntArray, lens: IntArray) -> None:
        """The rows are in the step of attention already."""

    def attend(self, q: Tensor, layer: int) -> Tensor:
        keys = self._pool.keys[layer]
        values = self._pool.values[layer]
        _, heads, head_dim, padded = keys.shape
        recorder = self._ops.recorder
        out = recorder.buffer(heads * head_dim)
        kept = recorder.buffer(heads * head_dim)
        self._queries[layer] = kept
        args = abi.CrossArgs(
            q=q.data_ptr(),
            q_stride=q.stride(0),
            out=out.data_ptr(),
            kept=kept.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            heads=heads,
            head_dim=head_dim,
            num_positions=self._pool.num_positions,
            padded=padded,
            scale=head_dim**-0.5,
        )
        recorder.add(args)
        return out

    def weights(self, row: int, places: slice, heads: Sequence[tuple[int, int]]) -> Tensor:
        _, num_heads, head_dim, _ = self._pool.keys[0].shape
        of_heads = []
        for layer, head in heads:
            queries = self._queries[layer][places].view(-1, num_heads, head_dim)
            of_heads.append((queries, layer, head))
        return weights_of(self._pool, row, of_heads)
