"""Pictures of a fake engine, for tests of the live page."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from tests.server.fake import RunningServer
from weft.messages.codec import ToEngine
from weft.messages.picture import (
    Picture,
    QueueColumns,
    RowColumns,
    StepColumns,
    TreeColumns,
    Watch,
)
from weft.messages.pins import PinStatus
from weft.messages.status import Stats

HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202e"


def ints(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def longs(*values: int) -> bytes:
    return np.array(values, dtype=np.int64).tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, dtype=np.float32).tobytes()


def picture(number: int, rank: int = 0) -> Picture:
    """The `number`th of an engine with one row, one step a picture and a node of bytes."""
    return Picture(
        at_s=float(number),
        rank=rank,
        stats=Stats(
            num_running=1,
            kv_tokens=100,
            kv_used=10,
            pinned_tokens=6,
            total_steps=number + 1,
        ),
        steps=StepColumns(
            numbers=longs(number),
            modes=ints(1),
            num_rows=ints(1),
            num_prompts=ints(0),
            num_tokens=ints(1),
            num_waiting=ints(0),
            seconds=floats(0.0021),
        ),
        rows=RowColumns(
            rids=[HOSTILE if rank == 0 else f"of engine {rank}"],
            tenants=["alice"],
            is_decoding=ints(1),
            prompt_len=ints(9),
            cached_len=ints(4),
            kv_len=ints(9),
            fill_len=ints(9),
            num_output=ints(2),
            max_len=ints(20),
            age_s=floats(1.5),
            causes=["changed"],
            missed_len=ints(3),
        ),
        queue=QueueColumns(),
        pins=[
            PinStatus(
                name=HOSTILE,
                tenant="alice",
                tokens=64,
                state="firm",
                ttl_s=300.0,
                expires_in_s=120.0,
                uses=3,
            )
        ],
        tree=TreeColumns(
            round=number + 1,
            num_nodes=1,
            parents=ints(-1),
            num_tokens=ints(3),
            num_below=longs(3),
            ages=longs(0),
            locks=ints(1),
            pins=ints(0),
            heads=[ints(*b"<b>", 268)],
        ),
    )


def pictured(
    server: RunningServer,
    num_engines: int = 1,
    make: Callable[[int, int], Picture] = picture,
) -> list[Watch]:
    """From now on the fake engine of `server` answers questions for pictures, as so many engines
    would. Returns the list of these, which grows. `make(number, rank)` is the picture."""
    asked: list[Watch] = []
    send = server.engine.send

    def answer(message: ToEngine) -> None:
        if not isinstance(message, Watch):
            send(message)
            return
        first, *others = [make(len(asked), rank) for rank in range(num_engines)]
        asked.append(message)
        made = msgspec.structs.replace(first, call=message.call, others=others)
        server.engine.answer(made)

    server.engine.send = answer  # type: ignore[method-assign]
    return asked
