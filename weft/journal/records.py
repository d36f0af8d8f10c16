"""The records of the decision journal, in their order of use: `recorder.py` writes them,
`replay.py` reads them.

`VERSION` says what the fields mean. From version 6 on, adapters are read while steps go on, and
`Ended` tells that from other work of the device. From version 5 on, `Began` may stand between other
records, with the state of the engine at that place. Version 4 has the settings of the scheduler by
the names of its options (`earlier.py` reads those of before). Version 3 has digests of every
operation of a plan; version 2 had one digest of the sampling alone (`digest.py` computes both).
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from weft.arrays import FloatArray
from weft.grammar.protocol import Advance
from weft.memory.handoff.protocol import HandoffNews
from weft.memory.tiers.protocol import TierNews
from weft.messages.codec import ToEngine
from weft.plan.device import DeviceReply
from weft.plan.outputs import AuxOutput, PooledVectors
from weft.plan.step import Result, find
from weft.scheduler.settings import SchedulerSettings

VERSION = 6
READ_BESIDE = 6  # the first in which adapters are
READABLE = (2, 3, 4, 5, 6)


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """A replay can begin here: the first record of a file, and from time to time another."""

    version: int
    weft: str
    unix_s: float
    depth: int  # of the loop
    settings: SchedulerSettings  # that it was built with, or as they were when the state was taken
    state: bytes = (
        b""  # of the engine (`snapshot.py`); nothing: it is idle and has done nothing yet
    )
    step: int = 0  # that comes next


BEGINNING = b"\x98\xa5began"  # the first bytes of a `Began` of version 5: eight values, its tag


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    message: ToEngine


class Turned(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    pass


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """A reply could not be sent, and the requests that it was about end with this message."""

    ids: tuple[int, ...]
    message: str


class Read(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    now: float


class CacheFlushed(msgspec.Struct, frozen=True, array_like=True, tag="fl"):
    """A call by name has emptied the prefix cache at once. Only an earlier weft recorded such."""


class Launched(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """A batch: its size in clear, its arrays and operations as digests (CRC-32).

    Of the plan's inputs, vectors are left out, for the journal does not keep those of prompts.
    """

    step: int
    mode: int
    num_rows: int
    num_tokens: int
    rows: int
    starts: int
    lens: int
    tokens: int
    slots: int
    samples: int
    table: int
    sampling: int  # in version 2 with the operations
    logits: int = 0  # from version 3 on
    outputs: int = 0  # from version 3 on
    window: int = 0  # of a model whose layers with windows have a pool of their own
    states: int = 0  # of a model with layers that keep a state
    layers: int = 0  # of a step that computes some of them
    adapters: int = 0  # of a step in which a request has one
    drafting: int = 0  # of a step of a draft model
    media: int = 0  # of a step that takes vectors of pictures, videos or sounds
    positions: int = 0  # `Plan.rotation` and `Plan.sees_to`, where a step has one of them


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """A result.

    Log probabilities and hidden states are left out, and of vectors all but that they are finite:
    nothing else is decided by them.
    """

    step: int
    tokens: bytes  # int32 [sum of counts]
    invalid: bytes = b""  # bool [S], or nothing
    faults: tuple[tuple[int, str], ...] = ()
    finite: bytes = b""  # bool [E] which vectors are finite; nothing: all that there are
    counts: bytes = b""  # int32 [S]; nothing: one token each
    not_encoded: tuple[tuple[bytes, str], ...] = ()
    encoded: tuple[bytes, ...] = ()
    encoder_s: float = 0.0

    @classmethod
    def of(cls, step: int, result: Result) -> Sampled:
        invalid = b"" if result.invalid is None else result.invalid.tobytes()
        counts = b"" if result.counts is None else result.counts.tobytes()
        return cls(
            step=step,
            tokens=result.tokens.tobytes(),
            invalid=invalid,
            faults=result.faults,
            finite=_finite(result),
            counts=counts,
            not_encoded=result.not_encoded,
            encoded=result.encoded,
            encoder_s=result.encoder_s,
        )

    def result(self) -> Result:
        outputs: tuple[AuxOutput, ...] = ()
        if self.finite:
            outputs = (PooledVectors(_stand_ins(self.finite)),)
        return Result(
            tokens=np.frombuffer(self.tokens, dtype=np.int32),
            counts=np.frombuffer(self.counts, dtype=np.int32) if self.counts else None,
            invalid=np.frombuffer(self.invalid, dtype=np.bool_) if self.invalid else None,
            faults=self.faults,
            outputs=outputs,
            not_encoded=self.not_encoded,
            encoded=self.encoded,
            encoder_s=self.encoder_s,
        )


def _finite(result: Result) -> bytes:
    """`Sampled.finite` of a result."""
    pooled = find(result.outputs, PooledVectors)
    if pooled is None:
        return b""
    finite = np.isfinite(pooled.vectors).all(axis=1)
    return b"" if finite.all() else finite.tobytes()


def _stand_ins(finite: bytes) -> FloatArray:
    """[E, 1] vectors of one number that are finite where the recorded ones were."""
    is_finite = np.frombuffer(finite, dtype=np.bool_)
    return np.where(is_finite, 0.0, np.nan).astype(np.float32)[:, None]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    step: int
    message: str
    at_launch: bool = False


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Work for the device that was no step is done: what follows from it. Recorded where its end
    was seen.
    """

    ok: bool
    kv_is_stale: bool
    is_reloaded: bool
    released: tuple[str, ...]
    is_beside: bool = False  # steps went on: an adapter was read

    def reply(self) -> DeviceReply:
        return DeviceReply(
            ok=self.ok,
            kv_is_stale=self.kv_is_stale,
            is_reloaded=self.is_reloaded,
            released=self.released,
        )


class Readied(msgspec.Struct, frozen=True, array_like=True, tag="y"):
    """A grammar is ready, or, with a `message`, refused."""

    id: int
    warnings: tuple[str, ...]
    message: str
    status: int
    compile_s: float


class Advanced(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """What became of the tokens of a step in their grammars.

    Masks are left out: nothing else is decided by them.
    """

    moves: tuple[Advance, ...]


class Followed(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """How many of the tokens that were guessed a grammar may take."""

    num_tokens: int


class Checked(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """The error of a logit processor that a request names, or of its parameters; "" for none."""

    wrong: str


class StoreSought(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """How much of a request's prompt is stored. Not recorded where that is nothing."""

    id: int
    num_tokens: int
    read_s: float


class Lacked(msgspec.Struct, frozen=True, array_like=True, tag="sl"):
    """How many tokens of a sequence are stored, or being written, that is worth writing, and
    whether it can be resumed at its end."""

    num_tokens: int
    can_resume: bool = True


class Told(msgspec.Struct, frozen=True, array_like=True, tag="st"):
    """What has come to its end in the store of KV. Not recorded where nothing has."""

    news: TierNews


class HandedOver(msgspec.Struct, frozen=True, array_like=True, tag="ho"):
    """What another server has said. Not recorded where it has said nothing."""

    news: HandoffNews


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """A StepOutput: its size in clear, its content as CRC-32."""

    num_tokens: int
    num_finished: int
    content: int


class Broke(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    exception: str


Record: TypeAlias = (
    Began
    | (
        Submitted
        | Turned
        | Lost
        | Read
        | CacheFlushed
        | Sampled
        | Failed
        | Ended
        | Readied
        | Advanced
        | Followed
        | Checked
        | StoreSought
        | Lacked
        | Told
        | HandedOver
    )
    | (Launched | Answered | Broke)
)  # in the order of above
