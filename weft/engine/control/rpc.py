"""Methods that can be called by name: over the engine's RPC socket, `POST /rpc`, and `weft ctl rpc`.

`METHODS` is all there is; nothing else can be reached by a name. To add one: a struct of its parameters, a function,
a line in the table. A method answers at once, with plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from weft.engine import explain as insight
from weft.engine.input_gate import InputBlocker
from weft.engine.pause import Pause
from weft.messages.codec import FromEngine
from weft.messages.control import Explanation, QueueStatus, Stats
from weft.messages.flow import Rpc, RpcReply
from weft.messages.requests import Abort
from weft.observe import garbage
from weft.scheduler.features.grammar import GrammarPart
from weft.scheduler.features.sessions import Sessions
from weft.scheduler.policy import UnknownPolicy
from weft.scheduler.request import chosen
from weft.scheduler.scheduler import Scheduler


class Engine(Protocol):
    """What methods need of `service/engine.py`."""

    scheduler: Scheduler
    sessions: Sessions
    grammar: GrammarPart
    input: InputBlocker
    pause: Pause

    def clock(self) -> float: ...

    def stats(self) -> Stats: ...


class BadCall(ValueError):
    """The call cannot be carried out as it is; the message says why."""


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters."""


class ByName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The exact name of requests."""

    rid: str


class AbortParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The exact name of requests or of their group, or all of them."""

    rid: str = ""
    all: bool = False


class PolicyParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    policy: str


class Method(NamedTuple):
    run: Callable[[Any, Any], Any]  # of the engine and the parameters
    params: type[msgspec.Struct]
    about: str


def list_methods(engine: Engine, params: Nothing) -> dict[str, str]:
    return {name: method.about for name, method in METHODS.items()}


def get_queue_status(engine: Engine, params: Nothing) -> QueueStatus:
    return queue_status(engine)


def get_stats(engine: Engine, params: Nothing) -> Stats:
    return engine.stats()


def trace_request_flow(engine: Engine, params: ByName) -> list[Explanation]:
    return insight.trace_request_flow(engine.scheduler, params.rid, engine.clock())


def log_request_processing_time(engine: Engine, params: ByName) -> int:
    """Returns how many requests of this name were written to the log."""
    now = engine.clock()
    found = insight.trace_request_flow(engine.scheduler, params.rid, now)
    for one in found:
        insight.log_request_processing_time(engine.scheduler, one.id, now)
    return len(found)


def abort(engine: Engine, params: AbortParams) -> int:
    """Returns how many requests it has ended."""
    if not params.rid and not params.all:
        raise BadCall("give rid or all")
    message = Abort(all=params.all, names=(params.rid,))
    num_chosen = len(chosen(engine.scheduler.requests, message))
    engine.scheduler.abort(message)
    return num_chosen


def set_policy(engine: Engine, params: PolicyParams) -> str:
    """Returns the policy until now."""
    before = engine.scheduler.settings.policy
    try:
        engine.scheduler.set_policy(params.policy)
    except UnknownPolicy as exc:
        raise BadCall(str(exc)) from exc
    return before


def flush_cache(engine: Engine, params: Nothing) -> bool:
    """Returns whether the cache could be flushed now."""
    return engine.scheduler.flush_cache()


def freeze_gc(engine: Engine, params: Nothing) -> int:
    return garbage.freeze()


METHODS: dict[str, Method] = {
    "list_methods": Method(list_methods, Nothing, "these methods"),
    "get_queue_status": Method(get_queue_status, Nothing, "queue and batch in numbers"),
    "get_stats": Method(get_stats, Nothing, "gauges, and counters since the start"),
    "trace_request_flow": Method(
        trace_request_flow, ByName, "what happened to the requests named `rid`, and why"
    ),
    "log_request_processing_time": Method(
        log_request_processing_time,
        ByName,
        "write the times of the requests named `rid` by stage to the log",
    ),
    "abort": Method(
        abort,
        AbortParams,
        "end the requests named `rid`, or those of that group, or with `all` all",
    ),
    "set_policy": Method(set_policy, PolicyParams, "order waiting requests by `policy`"),
    "flush_cache": Method(
        flush_cache, Nothing, "empty the prefix cache, if no request uses it now"
    ),
    "freeze_gc": Method(
        freeze_gc, Nothing, "move all objects out of the garbage collector's sight"
    ),
}


def queue_status(engine: Engine) -> QueueStatus:
    """The queue in numbers, and whether input and generation are open."""
    return msgspec.structs.replace(
        insight.get_queue_status(engine.scheduler, len(engine.sessions)),
        grammar_queue_size=len(engine.grammar.queue),
        input_state=engine.input.state.value,
        paused=engine.pause.mode or "",
    )


def rpc(engine: Engine, message: Rpc) -> FromEngine:
    """Call a method. An unknown one is answered with those there are, wrong parameters with what is wrong."""
    try:
        result = _result(engine, message.method, message.params)
    except BadCall as exc:
        return RpcReply(call=message.call, success=False, message=str(exc))
    return RpcReply(call=message.call, success=True, result=result)


def _result(engine: Engine, name: str, params: Mapping[str, Any]) -> Any:
    method = METHODS.get(name)
    if method is None:
        raise BadCall(f"there is no method {name[:64]!r}; there are {', '.join(METHODS)}")
    try:
        checked = msgspec.convert(params, method.params)
    except msgspec.ValidationError as exc:
        raise BadCall(f"{name}: {exc}") from exc
    return msgspec.to_builtins(method.run(engine, checked))
