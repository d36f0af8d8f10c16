"""What controls the flow of work into the engine: health checks, blocking the input, pausing generation, RPC.

Each control request stands beside its reply, as in `control.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PauseMode = Literal["abort", "retract", "in_place"]


class HealthCheck(msgspec.Struct, frozen=True, kw_only=True, tag="health_check"):
    """Ask whether the engine computes. Never queues: the next result of a step answers it; an engine in which nothing
    runs generates a token for it. While generation is paused it is answered at once."""

    call: int


class HealthCheckReply(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="health_check_reply"
):
    call: int
    success: bool
    message: str = ""


class Block(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """Hold back requests that come from now on; those that came before go on. Blocking twice is blocking once."""

    call: int


class Unblock(msgspec.Struct, frozen=True, kw_only=True, tag="unblock"):
    """Let requests in again, what was held back first, as soon as all engines that run in step have been asked to."""

    call: int


class InputReply(msgspec.Struct, frozen=True, kw_only=True, tag="input_reply"):
    """Answers `Block` and `Unblock`."""

    call: int
    state: str  # unblocked, blocked, global_unblock_barrier
    held_requests: int


class PauseGeneration(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pause_generation"
):
    """Run no further step until `ContinueGeneration`. Open requests are aborted, or those that run are taken back to
    the queue, so that they hold no KV memory, or all stay where they are. Requests that come meanwhile wait."""

    call: int
    mode: PauseMode = "abort"


class ContinueGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="continue_generation"):
    """Go on. Does nothing if generation is not paused."""

    call: int


class GenerationReply(msgspec.Struct, frozen=True, kw_only=True, tag="generation_reply"):
    """Answers `PauseGeneration` and `ContinueGeneration`."""

    call: int
    paused: str  # the mode, or nothing
    num_requests: int  # that are open now


class Rpc(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="rpc"):
    """Call one of the methods that `engine/control/rpc.py` lists, and no other. Answered at once."""

    call: int
    method: str
    params: dict[str, Any] = {}


class RpcReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="rpc_reply"):
    call: int
    success: bool
    result: Any = None
    message: str = ""  # what was wrong with the call


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    """So many messages have come that could not be read. The engine's own intake says it, for the counters."""

    num: int
