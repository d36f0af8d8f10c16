"""Parts from outside of weft that have the faults that a test asks for, in a server of its own.

`POST /plant {"part": ..., "fault": ...}` plants a fault in the engine's process, until another is
planted; "" takes it away.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import msgspec
import numpy as np
import torch
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp
from torch import Tensor

from weft import LogitProcessor
from weft.config.model import ModelConfig
from weft.executor.backend import AttentionBatch
from weft.executor.device import DeviceOutput
from weft.executor.kv_pool import KVPool
from weft.executor.logit_processors.processor import ProcessorRequest
from weft.executor.plain.attention import TorchPaged
from weft.executor.runner import Pass, Run
from weft.memory.accounting.holders import ResumeStateInUse
from weft.messages.outside import OutsideControl
from weft.models.layers.attention import Heads
from weft.plan.step import Plan, Result
from weft.scheduler.groups.protocol import (
    GroupBudget,
    GroupLedger,
    GroupParts,
    KvGroup,
    PassFacts,
)
from weft.scheduler.policies.protocol import KeyPolicy
from weft.scheduler.request import Request as ScheduledRequest
from weft.server.body import json_response
from weft.server.context import ServerContext
from weft.server.operation import get
from weft.tiers.outside import store
from weft.tiers.outside.block_store import BlockStore

PLUGINS = ",".join(
    [
        "control=faulty_parts:PLANT",
        "routes=faulty_parts:ROUTE",
        "passes=faulty_parts:FaultyPass",
        "kv_groups=faulty_parts:faulty_group",
        "tiers=faulty_parts:FaultyStore",
    ]
)
ANYTHING: Any = "anything"  # a value of a wrong type
MANY_KEYS = 1_000


class Planted:
    """The fault of this process."""

    part = ""
    fault = ""


def planted(part: str) -> str:
    """The fault that this part should have now. Raises for those that are exceptions."""
    if Planted.part != part:
        return ""
    if Planted.fault == "raise":
        raise ArithmeticError(f"planted in {part}")
    if Planted.fault == "exit":
        sys.exit(f"planted in {part}")
    return Planted.fault


# ---- a control request that plants faults, and has some itself


class Plant(msgspec.Struct, kw_only=True):
    part: str = ""
    fault: str = ""


class Done(msgspec.Struct, kw_only=True):
    blocks: int


def plant(services: Any, message: Plant) -> Done:
    Planted.part = message.part
    Planted.fault = message.fault
    if planted("control"):
        return ANYTHING  # type: ignore[no-any-return]
    return Done(blocks=len(FaultyStore.blocks))


PLANT = OutsideControl(message=Plant, handler=plant, summary="Plant a fault")

# ---- a route, in the front's process: its fault is in the query


async def route(context: ServerContext, request: Request) -> ASGIApp:
    fault = request.query_params.get("fault", "")
    if fault == "raise":
        raise ArithmeticError("planted")
    if fault == "exit":
        sys.exit("planted")
    if fault == "shape":
        return ANYTHING  # type: ignore[no-any-return]
    if fault == "infinite":
        return json_response({"value": float("inf"), "object": object()})
    if fault == "stream":
        return StreamingResponse(_pieces())
    return json_response({"ok": True})


async def _pieces() -> Any:
    yield b"first"
    sys.exit("planted")


ROUTE = get("/faulty", route, "A route with faults")

# ---- a pass


class FaultyPass(Pass):
    name = "faulty"

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        output = then(plan)
        fault = planted("pass")
        if fault == "type":
            return ANYTHING  # type: ignore[no-any-return]
        if fault == "shape":
            return FewerTokens()
        if fault == "infinite":
            return InfiniteTokens()
        return output


class FewerTokens:
    def moved(self, move: Any) -> FewerTokens:
        return self

    def result(self) -> Result:
        return Result(tokens=np.zeros(0, np.int32))


class InfiniteTokens:
    def moved(self, move: Any) -> InfiniteTokens:
        return self

    def result(self) -> Result:
        return Result(tokens=np.full(1, np.inf))  # type: ignore[arg-type]


# ---- layers with memory of their own: `planted` names the hook


class FaultyBudget(GroupBudget):
    def fits(self, request: ScheduledRequest, extend: int, reserve: int, *, is_alone: bool) -> bool:
        planted("group.fits")
        return True


class FaultyLedger(GroupLedger):
    def usage(self) -> dict[str, int]:
        if planted("group.usage"):
            return {"anything": ANYTHING}
        return {}

    def audit(
        self, requests: Mapping[str, ScheduledRequest], held: Sequence[ResumeStateInUse]
    ) -> None:
        planted("group.audit")

    @property
    def imbalance(self) -> int:
        return ANYTHING if planted("group.imbalance") else 0


class FaultyGroup(KvGroup):
    ledger = FaultyLedger()

    def new_budget(self, facts: PassFacts) -> GroupBudget:
        if planted("group.new_budget"):
            return ANYTHING  # type: ignore[no-any-return]
        return FaultyBudget()

    @property
    def available(self) -> int | None:
        fault = planted("group.available")
        if fault == "infinite":
            return float("inf")  # type: ignore[return-value]
        return ANYTHING if fault else None

    def resumable(self, handle: Any, length: int) -> tuple[Any, int]:
        fault = planted("group.resumable")
        if fault == "infinite":
            return handle, 1 << 60
        return ANYTHING if fault else (handle, length)

    def lock(self, request: ScheduledRequest, found_len: int) -> None:
        planted("group.lock")

    def unlock(self, request: ScheduledRequest, handle: Any) -> None:
        planted("group.unlock")

    def take_row(self, request: ScheduledRequest) -> None:
        planted("group.take_row")

    def extend(self, request: ScheduledRequest) -> None:
        planted("group.extend")

    def before_decode(self, rows: Any) -> None:
        planted("group.before_decode")

    def extend_running(self, rows: Any, positions: Any) -> None:
        planted("group.extend_running")

    def inserted(self, request: ScheduledRequest, inserted: Any, since: int) -> None:
        planted("group.inserted")

    def shared(self, request: ScheduledRequest) -> None:
        planted("group.shared")

    def released(self, request: ScheduledRequest, row: int, computed: int, inserted: Any) -> None:
        planted("group.released")

    def reset(self) -> None:
        planted("group.reset")

    def with_slots(self, plan: Plan) -> Plan:
        if planted("group.with_slots"):
            return ANYTHING  # type: ignore[no-any-return]
        return plan


def faulty_group(parts: GroupParts) -> KvGroup:
    return FaultyGroup()


# ---- a store of KV


class FaultyStore(BlockStore):
    name = "the faulty store"
    blocks: ClassVar[dict[bytes, bytes]] = {}

    def keys(self) -> Iterable[bytes]:
        return []

    def get(self, key: bytes) -> bytes | None:
        fault = planted("store.get")
        block = self.blocks[key]
        if fault == "type":
            return ANYTHING  # type: ignore[no-any-return]
        if fault == "shape":
            return block[:-1]
        if fault == "other":
            return block[:-1] + bytes([block[-1] ^ 1])
        return block

    def put(self, key: bytes, block: bytes) -> None:
        planted("store.put")
        self.blocks[key] = block

    def clear(self) -> None:
        planted("store.clear")
        self.blocks.clear()


class EndlessStore(FaultyStore):
    def keys(self) -> Iterable[bytes]:
        store.MAX_KEYS = MANY_KEYS  # of millions, the last ones tell nothing new
        return (number.to_bytes(32, "big") for number in itertools.count())


# ---- an attention backend


class FaultyAttention:
    def __init__(self, config: ModelConfig, pool: KVPool, context_length: int) -> None:
        self._own = TorchPaged(config, pool)

    def prepare(self, batch: AttentionBatch) -> None:
        planted("attention.prepare")
        self._own.prepare(batch)

    def narrow(self, x: Tensor) -> Tensor:
        planted("attention.narrow")
        return x

    def forward(self, qkv: Tensor, heads: Heads, layer: int) -> Tensor:
        out = self._own.forward(qkv, heads, layer)
        fault = planted("attention.forward")
        if fault == "type":
            return ANYTHING  # type: ignore[no-any-return]
        if fault == "shape":
            return out[:, :-1]
        if fault == "infinite":
            return torch.full_like(out, torch.inf)
        return out


# ---- a policy and a logit processor


class FaultyPolicy(KeyPolicy):
    def key(self, table: Any, indices: Any, now: float) -> Any:
        fault = planted("policy")
        if fault == "shape":
            return np.zeros(len(indices) + 1)
        if fault == "infinite":
            return np.full(len(indices), np.nan)
        return np.zeros(len(indices))


class FaultyProcessor(LogitProcessor):
    def apply(self, logits: Tensor, requests: Sequence[ProcessorRequest]) -> None:
        # `--logit-processors FILE.py` loads this file a second time, under another name.
        fault = importlib.import_module("faulty_parts").planted("processor")
        if fault == "infinite":
            logits.fill_(torch.inf)
        if fault == "shape":
            logits.resize_(0)


# ---- parts with which a server must not start


class RaisingPass(Pass):
    name = "raising"

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        sys.exit("always")


class NarrowAttention(FaultyAttention):
    def forward(self, qkv: Tensor, heads: Heads, layer: int) -> Tensor:
        return super().forward(qkv, heads, layer)[:, :-1]


class NoAttention:
    def __init__(self, config: ModelConfig, pool: KVPool, context_length: int) -> None:
        pass


class UnmadeStore(BlockStore):
    def __init__(self) -> None:
        sys.exit("no such service")


class TextGroup(KvGroup):
    @property
    def available(self) -> int | None:
        return ANYTHING  # type: ignore[no-any-return]


class EndlessGroup(KvGroup):
    def longest(self, capacity: int) -> int:
        return float("inf")  # type: ignore[return-value]


class RaisingGroup(KvGroup):
    def take_row(self, request: ScheduledRequest) -> NoReturn:
        raise ArithmeticError("always")


def text_group(parts: GroupParts) -> KvGroup:
    return TextGroup()


def endless_group(parts: GroupParts) -> KvGroup:
    return EndlessGroup()


def raising_group(parts: GroupParts) -> KvGroup:
    return RaisingGroup()


def endless() -> Iterator[int]:
    return itertools.count()
