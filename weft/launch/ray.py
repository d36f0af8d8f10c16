"""weft as a deployment of Ray Serve. Each replica has its own engine process, and answers with
weft's ASGI application.

    serve run weft.launch.ray:build model=Qwen/Qwen3-0.6B num_replicas=2 threads=4

Ray starts, watches, scales and replaces the replicas. With `nnodes`, the model of a replica is on
several machines (`ray_nodes.py`). Needs `pip install "ray[serve]"`; nothing else in weft imports
Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.types import ASGIApp

from weft.client.engine_state import EngineUnavailable
from weft.config.engine import EngineConfig
from weft.config.options import Command, SettingsError
from weft.config.server import ServerConfig
from weft.json_types import JsonObject
from weft.launch.embed import embedded
from weft.launch.front import Front
from weft.launch.ray_nodes import OtherMachines, check_machines
from weft.launch.ray_options import integer_of, is_on, number_of

HEALTH_PERIOD_S = 2.0  # Ray replaces a replica after three failed checks
MAX_ONGOING = 512  # maximum of open requests that Ray sends to one replica
# Open requests per replica that Ray's autoscaler aims at: requests share the steps of an engine.
TARGET_ONGOING = 32
SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
SCALING = ("min_replicas", "max_replicas", "target_ongoing_requests")
OF_RAY = (
    *("num_replicas", "num_cpus", "num_gpus", "max_ongoing_requests", "session_affinity"),
    *SCALING,
)


@serve.ingress()
class WeftReplica:
    """A replica of Ray Serve: one front with its engine."""

    def __init__(
        self, engine: EngineConfig, server: ServerConfig, words: Sequence[str], num_cpus: float
    ) -> None:
        """`words`: the settings as options of `weft serve`, for the other machines of this replica;
        `num_cpus`: CPUs that Ray reserves on each of them."""
        self._engine = engine
        self._server = server
        self._words = words
        self._num_cpus = num_cpus
        self._opened = AsyncExitStack()
        self._front: Front | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application. Ray calls this when it starts a replica."""
        engine = self._engine
        if engine.nnodes > 1:
            machines = OtherMachines(engine, self._words, self._num_cpus)
            self._opened.push_async_callback(machines.close)
            engine = machines.engine
        front = await self._opened.enter_async_context(embedded(engine, self._server))
        await front.wait_ready()
        self._front = front
        return front.app

    async def check_health(self) -> None:
        """Raises if the engine has ended or hangs. Ray then replaces the replica."""
        if self._front is None:
            return
        if self._front.lost.done():
            raise EngineUnavailable(self._front.lost.result().reason)
        self._front.client.state.require_ready()

    def record_routing_stats(self) -> JsonObject:
        """The load of this replica, for Ray's routers that balance by load."""
        if self._front is None:
            return {}
        stats = self._front.client.state.stats
        return {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "kv_used": stats.kv_used,
        }

    async def __del__(self) -> None:
        """Let open requests finish, then stop. Ray sends no new requests before it calls this."""
        if self._front is not None:
            await self._front.drain(self._server.drain_s)
        await self._opened.aclose()


def build(args: dict[str, str]) -> Application:
    """The application for `serve run`. `args`: options of `weft serve` written with underscores,
    and the options in `OF_RAY`. Raises SettingsError."""
    words: list[str] = []
    for name, value in args.items():
        if name not in OF_RAY:
            words += [f"--{name.replace('_', '-')}", str(value)]
    settings = Command("weft.launch.ray:build", "", EngineConfig, ServerConfig).read(words, {})
    engine = settings.make(EngineConfig)
    server = settings.make(ServerConfig)
    check_machines(engine)
    num_ranks = engine.tp_size * engine.pp_size // engine.nnodes
    if engine.enable_dp_attention:
        num_ranks = 1
    threads = engine.threads * num_ranks * server.dp_size
    num_cpus = number_of(args, "num_cpus", threads or 1)
    options: dict[str, Any] = {
        "health_check_period_s": HEALTH_PERIOD_S,
        "max_ongoing_requests": integer_of(args, "max_ongoing_requests", MAX_ONGOING),
        "graceful_shutdown_timeout_s": server.drain_s + 10.0,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": number_of(args, "num_gpus", 0)},
        **_replicas(args),
    }
    if engine.nnodes > 1:
        # The replica itself is in the first bundle; each further bundle has one following node.
        options["placement_group_bundles"] = [{"CPU": num_cpus}] * engine.nnodes
        options["placement_group_strategy"] = "STRICT_SPREAD"
    if is_on(args, "session_affinity"):
        options["request_router_config"] = RequestRouterConfig(request_router_class=SESSION_ROUTER)
    return serve.deployment(**options)(WeftReplica).bind(engine, server, words, num_cpus)


def _replicas(args: Mapping[str, str]) -> dict[str, Any]:
    """Ray's options for the number of replicas: a fixed number, or a range in which Ray chooses by
    the number of open requests. Raises SettingsError."""
    if "max_replicas" not in args:
        for name in SCALING:
            if name in args:
                raise SettingsError(f"{name} is {args[name]}, which needs max_replicas")
        return {"num_replicas": integer_of(args, "num_replicas", 1)}
    if "num_replicas" in args:
        raise SettingsError(
            f"num_replicas is {args['num_replicas']}, but with max_replicas Ray chooses the number"
        )
    least = integer_of(args, "min_replicas", 1, least=0)
    most = integer_of(args, "max_replicas", 1)
    if least > most:
        raise SettingsError(f"min_replicas is {least}, more than max_replicas ({most})")
    target = number_of(args, "target_ongoing_requests", TARGET_ONGOING)
    scaling = AutoscalingConfig(
        min_replicas=least, max_replicas=most, target_ongoing_requests=target
    )
    return {"autoscaling_config": scaling}
