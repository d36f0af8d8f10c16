"""The loaded adapters, by slot: from pairs of modules to parts of matrices.

    q_proj   A, B ─┐                    part 0 ─┐
    k_proj   A, B ─┼─▶ of one matrix:   part 1 ─┼─▶ AdapterOps, which the products use
    v_proj   ---  ─┘                    None   ─┘

It knows neither names of adapters nor requests: plans name slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.config.model import ModelConfig
from weft.config.projections import HEAD, projections
from weft.executor.lora.changes import added, stored_rows
from weft.executor.lora.folders import AdapterFolders
from weft.executor.lora.kinds.kind import AdapterError, short
from weft.executor.lora.pairs import Adapter, LoraPair, read_adapter
from weft.models.layers.weight import Get, MatrixRows, RowRun, Weight
from weft.ops.lora import AdapterOps, LoraPart, PutAdapter
from weft.ops.placement import is_here, local_parts, local_ranks, local_rows
from weft.ops.protocol import Matrix
from weft.plan.step import Plan
from weft.weights.base import in_base


class ReadyAdapter(NamedTuple):
    """An adapter that only needs to be copied into its slot."""

    put: PutAdapter
    has_head: bool
    num_bytes: int  # of its tensors in the file


class AdapterTable:
    """At most `num_adapter_slots` adapters, of ranks up to `max_rank`."""

    def __init__(
        self,
        model: ModelConfig,
        weights: Iterable[Weight],
        ops: AdapterOps,
        *,
        num_adapter_slots: int,
        max_rank: int,
        full_modules: str = "",
        folders: AdapterFolders | None = None,
    ) -> None:
        """`weights`: those of the model, after they were filled; their memory must not move from
        now on. `full_modules`: the modules that adapters may replace, as `projections` says.
        `folders`: the folders that may be read; None: any."""
        self._folders = folders
        self._model = model
        self._ops = ops
        self._num_adapter_slots = num_adapter_slots
        self._max_rank = max_rank
        self._full_modules = full_modules
        allowed = {in_base(name): one for name, one in projections(model, full_modules).items()}
        self._table = next(name for name, one in allowed.items() if one.is_table)
        self._rows: dict[str, MatrixRows] = {}  # by module
        self._biases: dict[str, Get] = {}  # by module that has one
        for weight in weights:
            name = in_base(weight.name)
            if name.endswith(".bias"):
                self._biases[name.removesuffix(".bias")] = weight.get
                continue
            module = name.removesuffix(".weight")
            if weight.rows is not None and module in allowed:
                self._rows[module] = weight.rows
        if model.tie_embeddings and HEAD in allowed:
            self._rows[HEAD] = self._rows[self._table]
        assert self._rows.keys() == allowed.keys(), "the model has other matrices than its config"
        products: dict[Matrix, int] = {}
        for name, rows in self._rows.items():
            if name != self._table:
                rank = max(products.get(rows.matrix, 0), allowed[name].most_rank(max_rank))
                products[rows.matrix] = rank
        table = {self._rows[self._table].matrix: allowed[self._table].most_rank(max_rank)}
        ops.watch(local_ranks(products), local_ranks(table))
        self._with_head: set[int] = set()  # slots of adapters that change the head
        # By uid, the one that was read first comes first. One that is never loaded is dropped
        # later.
        self._ready: dict[str, ReadyAdapter] = {}

    def read(self, path: str, uid: str) -> int:
        """Read the adapter with this content, for a later `load`; on one thread, also while steps
        run. Returns the bytes of its tensors. Raises ModelError; then nothing has changed."""
        adapter = self._read(path, uid)
        # The model's weights may change between steps.
        if not any(pair.depends_on_model for pair in adapter.pairs.values()):
            while len(self._ready) >= self._num_adapter_slots:
                self._ready.pop(next(iter(self._ready)), None)
            self._ready[uid] = self._laid_out(adapter)
        return adapter.info.num_bytes

    def load(self, adapter_slot: int, path: str, uid: str) -> int:
        """Load the adapter with this content into a slot; read it first if necessary. Returns the
        bytes of its tensors. Raises ModelError; then nothing has changed."""
        self._check(adapter_slot)
        ready = self._ready.pop(uid, None)
        if ready is None:
            ready = self._laid_out(self._read(path, uid))
        ready.put(adapter_slot)
        self._with_head.discard(adapter_slot)
        if ready.has_head:
            self._with_head.add(adapter_slot)
        return ready.num_bytes

    def _read(self, path: str, uid: str) -> Adapter:
        folder = Path(path) if self._folders is None else self._folders.folder(path)
        adapter = read_adapter(
            folder,
            self._model,
            self._ops.dtype,
            max_rank=self._max_rank,
            full_modules=self._full_modules,
        )
        if adapter.info.uid != uid:
            raise AdapterError("the files of the adapter have changed since it was asked for")
        return adapter

    def _laid_out(self, adapter: Adapter) -> ReadyAdapter:
        parts: dict[Matrix, list[LoraPart | None]] = {}
        tables: dict[Matrix, LoraPart] = {}
        for module, pair in adapter.pairs.items():
            matrix, runs = self._rows[module]
            if not is_here(matrix):
                continue
            change = self._added(module, pair)
            if module == self._table:
                tables[matrix] = change
                continue
            of_matrix = parts.setdefault(matrix, [None] * len(matrix.sizes))
            for part in {run.part for run in runs}:
                own = [run for run in runs if run.part == part]
                own.sort(key=lambda run: run.first)
                of_matrix[part] = _of_runs(change, own)
        put = self._ops.prepare(local_parts(parts), local_rows(tables))
        return ReadyAdapter(put, HEAD in adapter.pairs, adapter.info.num_bytes)

    def _added(self, module: str, pair: LoraPair) -> LoraPart:
        """What the pair adds to the product of its module. Raises AdapterError."""
        bias = self._biases.get(module)
        if pair.bias is not None and bias is None:
            raise AdapterError(f"the adapter has a bias of {short(module)}; the model has none")
        found = added(
            module,
            pair,
            stored_rows(self._rows[module]),
            None if bias is None else bias(),
            num_rows=sum(run.size for run in self._rows[module].runs),
            is_table=module == self._table,
            dtype=self._ops.dtype,
        )
        if not self._ops.has_gains and (found.gain is not None or found.shift is not None):
            raise AdapterError(
                f"the adapter has DoRA or a bias in {short(module)}, which is computed on a CPU "
                "(--device cpu), or by torch alone (--attention-backend torch)"
            )
        return found

    def unload(self, adapter_slot: int) -> None:
        """Forget the adapter in a slot, if there is one."""
        self._check(adapter_slot)
        self._ops.clear(adapter_slot)
        self._with_head.discard(adapter_slot)

    def begin(self, plan: Plan) -> None:
        """This step is computed next."""
        adapters = plan.adapters_of_tokens(self._num_adapter_slots)
        sampled = None
        if plan.adapters is not None and self._reads_sampled(plan, plan.adapters):
            sampled = np.repeat(plan.adapters, plan.num_sampled)
        self._ops.begin(adapters, sampled)

    def _reads_sampled(self, plan: Plan, adapters: IntArray) -> bool:
        """Whether anything computes the tokens alone after which one is sampled: a head that an
        adapter changes, or the last layer of a step with other tokens."""
        if not self._with_head.isdisjoint(adapters.tolist()):
            return True
        return int(plan.num_sampled.sum()) < plan.num_tokens

    def _check(self, adapter_slot: int) -> None:
        assert 0 <= adapter_slot < self._num_adapter_slots, (
            f"adapter_slot {adapter_slot} of {self._num_adapter_slots}"
        )


def _of_runs(change: LoraPart, runs: Sequence[RowRun]) -> LoraPart:
    """The outputs of a module that these runs store, in their order."""
    return change._replace(
        b=_rows_of(change.b, runs),
        gain=None if change.gain is None else _rows_of(change.gain, runs),
        shift=None if change.shift is None else _rows_of(change.shift, runs),
    )


def _rows_of(values: Tensor, runs: Sequence[RowRun]) -> Tensor:
    rows = [values[run.begin : run.begin + run.size] for run in runs]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
