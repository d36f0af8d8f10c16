"""The records of the decision journal: `recorder.py` writes them, `replay.py` reads them.

`VERSION` defines the meaning of the fields. Since version 6, adapters are read while steps run, and
`Ended` distinguishes this from other work of the device. Since version 5, `Began` may stand between
other records, with the state of the engine at that place. Version 4 has the scheduler's settings
by the names of its options (`earlier.py` converts the older names). Version 3 has digests of every
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
READ_BESIDE = 6  # the first version that reads adapters while steps run
READABLE = (2, 3, 4, 5, 6)


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """A replay can begin here: the first record of a file, and later ones at intervals."""

    version: int
    weft: str
    unix_s: float
    depth: int  # steps in flight, of the engine's loop
    settings: SchedulerSettings  # settings at the start, or at the time of the state
    state: bytes = (
        b""  # of the engine (`snapshot.py`); empty: it is idle and has not done anything yet
    )
    step: int = 0  # number of the next step


BEGINNING = b"\x98\xa5began"  # the first bytes of a `Began` of version 5: eight values, its tag


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    message: ToEngine


class Turned(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    pass


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """A reply could not be sent. Its requests end with this message."""

    ids: tuple[int, ...]
    message: str


class Read(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    now: float


class CacheFlushed(msgspec.Struct, frozen=True, array_like=True, tag="fl"):
    """A call by name emptied the prefix cache at once. Only an earlier weft recorded this."""


class Launched(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """A batch: its sizes in plain numbers, its arrays and operations as digests (CRC-32).

    Vectors among the plan's inputs are left out, because the journal does not keep vectors of
    prompts.
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
    sampling: int  # in version 2 including the operations
    logits: int = 0  # since version 3
    outputs: int = 0  # since version 3
    window: int = 0  # if sliding-window layers have a pool of their own
    states: int = 0  # if layers keep a state
    layers: int = 0  # if the step computes only some layers
    adapters: int = 0  # if a request of the step has an adapter
    drafting: int = 0  # if the step is of a draft model
    media: int = 0  # if the step uses vectors of pictures, videos or sounds
    positions: int = 0  # `Plan.rotation` and `Plan.sees_to`, if a step has one of them


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The result of a step.

    Log probabilities and hidden states are left out, and so are the values of vectors, except
    whether they are finite: no decision depends on the rest.
    """

    step: int
    tokens: bytes  # int32 [sum of counts]
    invalid: bytes = b""  # bool [S]; empty: none
    faults: tuple[tuple[int, str], ...] = ()
    finite: bytes = b""  # bool [E] whether each vector is finite; empty: all are
    counts: bytes = b""  # int32 [S]; empty: one token each
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
    """The value of `Sampled.finite` for a result."""
    pooled = find(result.outputs, PooledVectors)
    if pooled is None:
        return b""
    finite = np.isfinite(pooled.vectors).all(axis=1)
    return b"" if finite.all() else finite.tobytes()


def _stand_ins(finite: bytes) -> FloatArray:
    """[E, 1] substitutes: finite where the recorded vectors were, else NaN."""
    is_finite = np.frombuffer(finite, dtype=np.bool_)
    return np.where(is_finite, 0.0, np.nan).astype(np.float32)[:, None]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    step: int
    message: str
    at_launch: bool = False


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Work of the device that is not a step has ended, with these effects. Recorded where the
    engine saw the end."""

    ok: bool
    kv_is_stale: bool
    is_reloaded: bool
    released: tuple[str, ...]
    is_beside: bool = False  # an adapter was read, while steps went on

    def reply(self) -> DeviceReply:
        return DeviceReply(
            ok=self.ok,
            kv_is_stale=self.kv_is_stale,
            is_reloaded=self.is_reloaded,
            released=self.released,
        )


class Readied(msgspec.Struct, frozen=True, array_like=True, tag="y"):
    """A grammar is ready; or refused, if there is a `message`."""

    id: int
    warnings: tuple[str, ...]
    message: str
    status: int
    compile_s: float


class Advanced(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The moves of grammars after the tokens of a step.

    Masks are left out: no decision depends on them.
    """

    moves: tuple[Advance, ...]


class Followed(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """The number of drafted tokens that a grammar accepts."""

    num_tokens: int


class Checked(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """The error of a logit processor that a request names, or of its parameters; "" if none."""

    wrong: str


class StoreSought(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """The stored part of a request's prompt. Not recorded if nothing is stored."""

    id: int
    num_tokens: int
    read_s: float


class Lacked(msgspec.Struct, frozen=True, array_like=True, tag="sl"):
    """The number of tokens of a sequence worth writing that are already stored or being written,
    and whether a request can resume at their end."""

    num_tokens: int
    can_resume: bool = True


class StoreNews(msgspec.Struct, frozen=True, array_like=True, tag="st"):
    """Operations of the KV store that have ended. Not recorded if there are none."""

    news: TierNews


class HandedOver(msgspec.Struct, frozen=True, array_like=True, tag="ho"):
    """The news from another server. Not recorded if there are none."""

    news: HandoffNews


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """A StepOutput: its sizes in plain numbers, its content as CRC-32."""

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
        | StoreNews
        | HandedOver
    )
    | (Launched | Answered | Broke)
)  # in the order above
