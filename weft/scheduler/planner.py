"""Turns the choice of requests into arrays: which tokens run, where K and V go, how the next token is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.executor.plan import (
    LAST_SAMPLED,
    BoolArray,
    ForwardMode,
    IntArray,
    LogitBias,
    Plan,
    Sampling,
)
from weft.scheduler.batch import NO_ROWS, Batch
from weft.scheduler.kv import KvMemory
from weft.scheduler.part import Moments, SamplingExtras
from weft.scheduler.request import Request


class Work(NamedTuple):
    """The tokens of one step: R requests, T tokens."""

    rows: IntArray  # [R]
    starts: IntArray  # [R]
    lens: IntArray  # [R]
    tokens: IntArray  # [T]
    slots: IntArray  # [T]
    samples: BoolArray  # [R]


def prepare_for_extend(kv: KvMemory, requests: Sequence[Request]) -> Work:
    """Allocate and list the next piece (up to `extend_end`) of each request's prompt."""
    columns = kv.columns
    slots = [kv.extend(request) for request in requests]
    tokens = [columns.tokens[request.row, request.kv_len : request.extend_end] for request in requests]
    work = Work(
        rows=np.array([request.row for request in requests], dtype=np.int32),
        starts=np.array([request.kv_len for request in requests], dtype=np.int32),
        lens=np.array([request.extend_len for request in requests], dtype=np.int32),
        tokens=np.concatenate(tokens),
        slots=np.concatenate(slots),
        samples=np.array([request.extend_end == request.fill_len for request in requests], dtype=np.bool_),
    )
    for request in requests:
        request.kv_len = request.extend_end
        if request.kv_len == request.fill_len:
            columns.seq_len[request.row] = request.fill_len + 1
    return work


def prepare_for_decode(kv: KvMemory, rows: IntArray) -> Work:
    """Allocate and list one token for each decoding row."""
    columns, n = kv.columns, len(rows)
    starts: IntArray = columns.seq_len[rows] - 1
    slots = kv.extend_by_one(rows)
    columns.seq_len[rows] += 1
    return Work(
        rows=rows,
        starts=starts,
        lens=np.ones(n, dtype=np.int32),
        tokens=np.full(n, LAST_SAMPLED, dtype=np.int32),
        slots=slots,
        samples=np.ones(n, dtype=np.bool_),
    )


def mix_with_running(extend: Work, decode: Work) -> Work:
    """One step of both: prefills first, then the decoding rows with one token each."""
    return Work(*(np.concatenate(pair) for pair in zip(extend, decode, strict=True)))


class Planner:
    """Makes batches with their plans. Numbers the steps."""

    def __init__(self, kv: KvMemory, moments: Moments, first_step: int = 0) -> None:
        self._kv = kv
        self._columns = kv.columns
        self._moments = moments
        self.num_steps = first_step

    def make_batch(self, prefills: list[Request], decode_rows: IntArray = NO_ROWS) -> Batch:
        """The next step: prefills, decoding rows, or both."""
        if not prefills:
            mode, work = ForwardMode.DECODE, prepare_for_decode(self._kv, decode_rows)
        else:
            mode, work = ForwardMode.EXTEND, prepare_for_extend(self._kv, prefills)
            if len(decode_rows):
                mode, work = ForwardMode.MIXED, mix_with_running(work, prepare_for_decode(self._kv, decode_rows))
        batch = Batch(mode, prefills, work.rows, work.samples, self._columns)
        batch.plan = Plan(
            step=self.num_steps,
            mode=mode,
            **work._asdict(),
            sampling=self._sampling(batch, (work.starts + work.lens)[work.samples]),
            table=self._kv.take_writes(),
        )
        self.num_steps += 1
        return batch

    def _sampling(self, batch: Batch, positions: IntArray) -> Sampling:
        columns, rows = self._columns, batch.sample_rows
        extras = SamplingExtras()
        for prepare in self._moments.prepare:
            prepare(batch, columns, extras)
        return Sampling(
            temperature=columns.temperature[rows],
            top_p=columns.top_p[rows],
            top_k=columns.top_k[rows],
            min_p=columns.min_p[rows],
            seeds=columns.seed[rows],
            positions=positions,
            bias=_join(extras.biases),
            penalties=extras.penalties,
            mask=extras.mask,
            logprobs=extras.logprobs,
        )


def _join(biases: list[LogitBias]) -> LogitBias | None:
    if len(biases) < 2:
        return biases[0] if biases else None
    return LogitBias(
        index=np.concatenate([bias.index for bias in biases]),
        tokens=np.concatenate([bias.tokens for bias in biases]),
        values=np.concatenate([bias.values for bias in biases]),
    )
