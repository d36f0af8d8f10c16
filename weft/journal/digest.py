"""Digests (CRC-32) of the decisions that a journal compares, for values of any type.

A digest walks the fields of dataclasses in their order, so a new operation of a plan needs no line
here. It covers the name of each class, so that two operations never cancel out. Fields that are
marked `UNRECORDED` (`plan/logits.py`) are left out.
"""

from __future__ import annotations

import zlib
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np

from weft.arrays import BoolArray, FloatArray, IntArray, LongArray
from weft.journal.records import Answered, Launched
from weft.messages.replies import StepOutput
from weft.plan.inputs import MediaVectors
from weft.plan.logits import (
    ANY,
    AllowedTokens,
    FixedTokens,
    GrammarMask,
    LogitBias,
    Penalties,
    ProcessorCall,
)
from weft.plan.outputs import SampledLogprobsRequest
from weft.plan.step import Plan, find

_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_encode_in_order = msgspec.msgpack.Encoder().encode


def digest(value: Any, crc: int = 0) -> int:
    """CRC-32 of a dataclass, array, tuple of these, or plain value; `crc` is the start value."""
    if isinstance(value, np.ndarray):
        # Equal bytes with another dtype or shape are a different value.
        head = f"{value.dtype.str}{value.shape}".encode()
        crc = zlib.crc32(head, crc)
        return zlib.crc32(np.ascontiguousarray(value).data, crc)
    if isinstance(value, tuple):
        crc = zlib.crc32(b"%d" % len(value), crc)
        for one in value:
            crc = digest(one, crc)
        return crc
    if is_dataclass(value):
        kind: type = type(value)
        crc = zlib.crc32(kind.__name__.encode(), crc)
        for name in _recorded_fields(kind):
            crc = digest(getattr(value, name), crc)
        return crc
    return zlib.crc32(_encode(value), crc)


@cache
def _recorded_fields(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind) if one.metadata.get("is_recorded", True))


def launched(plan: Plan, version: int) -> Launched:
    """The record of a batch, with the digests of journal version `version`."""
    table = 0
    if plan.table is not None:
        writes = plan.table
        table = _crc(writes.rows, writes.starts, writes.lens, writes.slots)
    if plan.copies is not None:
        table = digest(plan.copies, table)
    # Version 2 has one digest of the sampling and of all operations together.
    logits = 0
    outputs = 0
    if version == 2:
        sampling = _sampling_of_version_2(plan)
    else:
        sampling = digest(plan.sampling)
        logits = digest(plan.logits)
        outputs = digest(plan.outputs)
    taken = find(plan.inputs, MediaVectors)
    media = 0
    if taken is not None:
        media = digest(taken)
    if plan.ahead is not None:
        media = digest(plan.ahead, media)
    positions = 0
    if plan.rotation is not None:
        positions = digest(plan.rotation)
    if plan.sees_to is not None:
        positions = digest(plan.sees_to, positions)
    return Launched(
        step=plan.step,
        mode=plan.mode,
        num_rows=len(plan.rows),
        num_tokens=len(plan.tokens),
        rows=_crc(plan.rows),
        starts=_crc(plan.starts),
        lens=_crc(plan.lens),
        tokens=_crc(plan.tokens),
        slots=_crc(plan.slots),
        samples=_crc(plan.samples),
        table=table,
        sampling=sampling,
        logits=logits,
        outputs=outputs,
        window=0 if plan.window is None else digest(plan.window),
        states=0 if plan.states is None else digest(plan.states),
        layers=0 if plan.layers is None else digest(plan.layers),
        adapters=0 if plan.adapters is None else digest(plan.adapters),
        drafting=0 if plan.drafting is None else digest(plan.drafting),
        media=media,
        positions=positions,
    )


def answered(output: StepOutput) -> Answered:
    """The record of an output, without log probabilities."""
    content = zlib.crc32(output.ids)
    content = zlib.crc32(output.tokens, content)
    if output.finished:
        # As plain values, which are encoded alike however many fields a `Finish` has: a message of
        # more than 15 fields has a longer head, also if most of them are omitted.
        finished = msgspec.to_builtins(output.finished)
        content = zlib.crc32(_encode_in_order(finished), content)
    num_tokens = len(output.tokens) // 4
    return Answered(num_tokens, len(output.finished), content)


def _crc(*arrays: IntArray | LongArray | FloatArray | BoolArray) -> int:
    crc = 0
    for array in arrays:
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return crc


def _sampling_of_version_2(plan: Plan) -> int:
    """`Launched.sampling` in version 2: the digests of some operations, combined by XOR."""
    crc = _crc(*plan.sampling)
    biases = [op for op in plan.logits if isinstance(op, LogitBias)]
    if biases:
        crc ^= _joined_biases(biases)
    for op in plan.logits:
        match op:
            case Penalties():
                crc ^= _crc(
                    op.index,
                    op.frequency,
                    op.presence,
                    op.repetition,
                    op.history,
                    op.lacks_last,
                )
            case AllowedTokens():
                crc ^= _crc(op.index, op.words)
            case FixedTokens():
                crc ^= _crc(op.index, op.tokens)
            case ProcessorCall():
                crc ^= _crc(op.index, *op.tokens)
            case GrammarMask():
                crc ^= _crc(op.index)
    asked = find(plan.outputs, SampledLogprobsRequest)
    if asked is not None:
        crc ^= _crc(asked.index, asked.num_top)
    return crc


def _joined_biases(biases: list[LogitBias]) -> int:
    """In version 2, all biases of a step were one operation."""
    index = np.concatenate([bias.index for bias in biases])
    tokens = np.concatenate([bias.tokens for bias in biases])
    values = np.concatenate([bias.values for bias in biases])
    if all(bias.after is None for bias in biases):
        return _crc(index, tokens, values)
    all_after = []
    for bias in biases:
        after = bias.after
        if after is None:
            after = np.full(len(bias.index), ANY, dtype=np.int32)
        all_after.append(after)
    return _crc(index, tokens, values, np.concatenate(all_after))
