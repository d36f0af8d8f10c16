"""Turns the choice of requests into arrays: which tokens run, where K and V go, how the next token is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray, consecutive
from weft.plan.step import ANY, LAST_SAMPLED, ForwardMode, LogitBias, Plan, Sampling
from weft.scheduler.batch import NO_ROWS, Batch
from weft.scheduler.feature import Extras, Moments
from weft.scheduler.kv import KvMemory
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
    tokens = [
        columns.tokens[request.row, request.kv_len : request.extend_end] for request in requests
    ]
    work = Work(
        rows=np.array([request.row for request in requests], dtype=np.int32),
        starts=np.array([request.kv_len for request in requests], dtype=np.int32),
        lens=np.array([request.extend_len for request in requests], dtype=np.int32),
        tokens=np.concatenate(tokens),
        slots=np.concatenate(slots),
        samples=np.array(
            [request.wants_tokens and request.completes for request in requests], dtype=np.bool_
        ),
    )
    for request in requests:
        request.kv_len = request.extend_end
        columns.kv_len[request.row] = request.kv_len
        if request.is_prefilled:
            columns.seq_len[request.row] = request.fill_len + 1
    return work


def prepare_for_decode(kv: KvMemory, rows: IntArray) -> Work:
    """Allocate and list what is left to compute of each decoding row: one token, or several whose ids are known."""
    columns = kv.columns
    starts, ends = columns.kv_len[rows], columns.seq_len[rows]
    lens: IntArray = ends - starts
    of_row, positions, tokens = rows, starts, np.full(len(rows), LAST_SAMPLED, dtype=np.int32)
    if int(lens.sum()) > len(rows):
        of_row, positions = np.repeat(rows, lens), consecutive(starts, lens)
        tokens = np.where(
            np.repeat(lens, lens) > 1, columns.tokens[of_row, positions], np.int32(LAST_SAMPLED)
        )
    slots = kv.extend_running(of_row, positions)
    columns.kv_len[rows] = ends
    columns.seq_len[rows] = ends + 1
    return Work(rows, starts, lens, tokens, slots, samples=np.ones(len(rows), dtype=np.bool_))


def mix_with_running(extend: Work, decode: Work) -> Work:
    """One step of both: prefills first, then the decoding rows."""
    return Work(*(np.concatenate(pair) for pair in zip(extend, decode, strict=True)))


class Planner:
    """Makes batches with their plans. Numbers the steps."""

    def __init__(self, kv: KvMemory, moments: Moments) -> None:
        self._kv = kv
        self._columns = kv.columns
        self._moments = moments
        self.num_steps = 0

    def make_batch(self, prefills: list[Request], decode_rows: IntArray = NO_ROWS) -> Batch:
        """The next step: prefills, decoding rows, or both."""
        if not prefills:
            work = prepare_for_decode(self._kv, decode_rows)
            mode = ForwardMode.DECODE if len(work.tokens) == len(work.rows) else ForwardMode.MIXED
        else:
            mode, work = ForwardMode.EXTEND, prepare_for_extend(self._kv, prefills)
            if len(decode_rows):
                mode, work = (
                    ForwardMode.MIXED,
                    mix_with_running(work, prepare_for_decode(self._kv, decode_rows)),
                )
        batch = Batch(
            mode, prefills, work.rows, work.starts, work.lens, work.samples, self._columns
        )
        extras = Extras()
        for prepare in self._moments.prepare:
            prepare(batch, self._columns, extras)
        batch.blocks_overlap = extras.blocks_overlap or extras.mask is not None
        batch.plan = Plan(
            step=self.num_steps,
            mode=mode,
            **work._asdict(),
            sampling=self._sampling(batch, (work.starts + work.lens)[work.samples], extras),
            table=self._kv.take_writes(),
            vectors=extras.vectors,
            wanted=extras.wanted,
        )
        self.num_steps += 1
        return batch

    def _sampling(self, batch: Batch, positions: IntArray, extras: Extras) -> Sampling:
        columns, rows = self._columns, batch.sample_rows
        return Sampling(
            temperature=columns.sampling.temperature[rows],
            top_p=columns.sampling.top_p[rows],
            top_k=columns.sampling.top_k[rows],
            min_p=columns.sampling.min_p[rows],
            seeds=columns.sampling.seed[rows],
            positions=positions,
            bias=_join(extras.biases),
            penalties=extras.penalties,
            processors=extras.processors,
            allowed=extras.allowed,
            mask=extras.mask,
            fixed=extras.fixed,
            logprobs=extras.logprobs,
        )


def _join(biases: list[LogitBias]) -> LogitBias | None:
    if len(biases) < 2:
        return biases[0] if biases else None
    return LogitBias(
        index=np.concatenate([bias.index for bias in biases]),
        tokens=np.concatenate([bias.tokens for bias in biases]),
        values=np.concatenate([bias.values for bias in biases]),
        after=_join_after(biases),
    )


def _join_after(biases: list[LogitBias]) -> IntArray | None:
    if all(bias.after is None for bias in biases):
        return None
    return np.concatenate(
        [
            np.full(len(bias.index), ANY, dtype=np.int32) if bias.after is None else bias.after
            for bias in biases
        ]
    )
