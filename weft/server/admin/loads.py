"""The load of the engines, for routers, dashboards and `weft ctl loads`.

An engine answers between two steps, whatever waits in its queue. If a step takes long, the answer
contains the engine's last numbers and their age: an engine sends its numbers every second while it
works, and when it becomes idle. The answers contain a list of engines, as SGLang's do; `dp_rank` is
the index of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.client.engine_state import EngineLoad, EngineUnavailable
from weft.json_types import JsonObject
from weft.observe.log import EventLog
from weft.server.body import json_response
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.numbers import query_number
from weft.server.limits import SCRAPE_TIMEOUT_S
from weft.server.operation import get

log = EventLog("loads")
LOADS_TIMEOUT_S = 0.1  # routers ask often, and prefer numbers of the last second to waiting
FORMATS = ("json", "prometheus")


async def loads(context: ServerContext, request: Request) -> ASGIApp:
    """An entry for each engine, the aggregate, and how full the server is."""
    found = loads_asked(request, await loads_of(context))
    capacity = fullness(found, context.config.knee_output_per_s)
    return loads_answer(request, context.info.version, found, {"capacity": capacity})


def loads_answer(
    request: Request, version: str, found: list[JsonObject], more: JsonObject
) -> ASGIApp:
    """The entries in `found`, with `more` fields; `?format=prometheus` returns the entries as
    metrics. Raises `ApiError`."""
    format = request.query_params.get("format", "json")
    if format not in FORMATS:
        message = f"format is {format[:64]!r}; one of {', '.join(FORMATS)} is expected"
        raise ApiError(400, message, param="format")
    if format == "prometheus":
        return Response(_page(found), media_type="text/plain; version=0.0.4")
    answer: JsonObject = {
        "timestamp": time.time(),
        "version": version,
        "dp_rank_count": len(found),
        "loads": found,
    }
    if found:
        answer["aggregate"] = aggregated(found)
    return json_response(answer | more)


def fullness(found: list[JsonObject], knee_output_per_s: float) -> dict[str, float | None]:
    """How full the server is: output tokens a second now, and at the knee of all its engines (as
    `weft plan` has found it; None: not known), and the one as a part of the other."""
    now = sum(load["gen_throughput"] for load in found if load["num_running_reqs"])
    knee = knee_output_per_s * len(found)
    return {
        "output_per_s": round(now, 2),
        "knee_output_per_s": knee or None,
        "full": round(now / knee, 4) if knee else None,
    }


def shared_fullness(models: Sequence[tuple[list[JsonObject], float]]) -> dict[str, float | None]:
    """`fullness` of a server whose models share its machine. Each is the loads of its engines and
    its knee: the parts of the knees add up, and the knee is that of the mix that runs now."""
    now = 0.0
    parts = 0.0
    is_known = any(knee for _, knee in models)
    for found, knee in models:
        one = fullness(found, knee)
        now += one["output_per_s"] or 0.0
        parts += one["full"] or 0.0
        if one["output_per_s"] and one["full"] is None:
            is_known = False
    return {
        "output_per_s": round(now, 2),
        "knee_output_per_s": round(now / parts, 2) if is_known and parts else None,
        "full": round(parts, 4) if is_known else None,
    }


async def get_load(context: ServerContext, request: Request) -> ASGIApp:
    """The short form: numbers of requests and tokens of each engine."""
    found: list[JsonObject] = []
    for load in await loads_of(context):
        short = {
            "dp_rank": load["dp_rank"],
            "num_reqs": load["num_total_reqs"],
            "num_waiting_reqs": load["num_waiting_reqs"],
            "num_tokens": load["num_used_tokens"],
        }
        found.append(short)
    return json_response(found)


def loads_asked(request: Request, found: list[JsonObject]) -> list[JsonObject]:
    """All loads, or only those of engines with the rank `?dp_rank`. Raises `ApiError`."""
    if "dp_rank" not in request.query_params:
        return found
    rank = int(query_number(request, "dp_rank", 0))
    chosen = [load for load in found if load["dp_rank"] == rank]
    if not chosen:
        last = max((load["dp_rank"] for load in found), default=0)
        message = f"dp_rank is {rank}; the engines of this server are 0 to {last}"
        raise ApiError(400, message, param="dp_rank")
    return chosen


async def loads_of(context: ServerContext) -> list[JsonObject]:
    """The numbers of every engine, and values derived from them. Raises `EngineUnavailable`."""
    client = context.client
    _ = client.engine
    await refresh(context, LOADS_TIMEOUT_S)
    return [_load(rank, engine) for rank, engine in enumerate(client.engines)]


def _load(rank: int, engine: EngineLoad) -> JsonObject:
    stats = engine.stats
    gauges = engine.numbers
    most = stats.max_running_requests
    utilization = round(stats.num_running / most, 4) if most else 0.0
    return {
        "dp_rank": rank,
        "age_s": round(time.monotonic() - engine.stats_at, 3),  # age of these numbers
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_total_reqs": stats.num_running + stats.num_waiting,
        "max_running_requests": most,
        "utilization": utilization,
        "num_used_tokens": stats.kv_used,
        "max_total_num_tokens": stats.kv_tokens,
        "token_usage": round(gauges.token_usage, 4),
        "cache_hit_rate": round(gauges.cache_hit_rate, 4),
        "gen_throughput": round(gauges.gen_throughput, 2),
        "last_gen_throughput": round(gauges.gen_throughput, 2),
        # All numbers, also zeros, which a message would omit.
        "stats": {name: getattr(stats, name) for name in stats.__struct_fields__},
    }


def aggregated(found: list[JsonObject]) -> dict[str, float]:
    """Sums and means over all engines."""

    def total(name: str) -> float:
        return float(sum(load[name] for load in found))

    return {
        "total_running_reqs": total("num_running_reqs"),
        "total_waiting_reqs": total("num_waiting_reqs"),
        "total_reqs": total("num_total_reqs"),
        "total_used_tokens": total("num_used_tokens"),
        "total_tokens": total("max_total_num_tokens"),
        "avg_token_usage": round(total("token_usage") / len(found), 4),
        "avg_throughput": round(total("gen_throughput") / len(found), 2),
        "avg_utilization": round(total("utilization") / len(found), 4),
    }


async def refresh(context: ServerContext, timeout_s: float = SCRAPE_TIMEOUT_S) -> None:
    """Request new numbers; if the engine does not answer in time, the last ones stay."""
    try:
        await context.client.get_state(timeout_s)
    except EngineUnavailable:
        log.debug("no_fresh_stats")


def _page(found: list[JsonObject]) -> bytes:
    """All numbers of the loads as gauges."""
    lines: list[str] = []
    for name, value in found[0].items() if found else ():
        if name == "dp_rank" or not isinstance(value, int | float):
            continue
        lines.append(f"# TYPE weft:load_{name} gauge\n")
        lines += [f"weft:load_{name}{{{_labels(load)}}} {load[name]}\n" for load in found]
    return "".join(lines).encode()


def _labels(load: JsonObject) -> str:
    rank = f'dp_rank="{load["dp_rank"]}"'
    if "model" not in load:
        return rank
    name = load["model"].replace("\\", r"\\")
    name = name.replace('"', r"\"")
    name = name.replace("\n", r"\n")
    return f'model_name="{name}",{rank}'


ROUTES = (
    get("/v1/loads", loads, "How busy the engine is", query=("dp_rank",)),
    get("/get_load", get_load, "How busy the engine is, in short"),
)
