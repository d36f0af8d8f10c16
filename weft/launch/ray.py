"""weft as a deployment of Ray Serve: each replica has an engine process of its own, and answers
with weft's own application.

    serve run weft.launch.ray:build model=Qwen/Qwen3-0.6B num_replicas=2 threads=4

Ray starts, watches, scales and replaces the replicas; requests with equal `x-session-id` go to the
same one where the deployment has a router for that. Needs `pip install weft[ray]`; nothing else in
weft imports Ray.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp

from weft.client.engine_state import EngineUnavailable
from weft.config.engine import EngineConfig
from weft.config.options import Command
from weft.config.server import ServerConfig
from weft.json_types import JsonObject
from weft.launch.embed import embedded
from weft.launch.front import Front

HEALTH_PERIOD_S = 2.0  # Ray replaces a replica that has failed three times
MAX_ONGOING = 512  # requests that Ray gives to one replica
OF_RAY = ("num_replicas", "num_cpus", "num_gpus", "max_ongoing_requests")


@serve.ingress()
class WeftReplica:
    """One front with its engine, in a replica of Ray Serve."""

    def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        self._engine = engine
        self._server = server
        self._opened = AsyncExitStack()
        self._front: Front | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray takes the application from here when it starts a replica."""
        front = await self._opened.enter_async_context(embedded(self._engine, self._server))
        await front.wait_ready()
        self._front = front
        return front.app

    async def check_health(self) -> None:
        """Raises if the engine has ended, or hangs: Ray replaces the replica."""
        if self._front is None:
            return
        if self._front.lost.done():
            raise EngineUnavailable(self._front.lost.result().reason)
        self._front.client.state.require_ready()

    def record_routing_stats(self) -> JsonObject:
        """For routers of Ray that go by load."""
        if self._front is None:
            return {}
        stats = self._front.client.state.stats
        return {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "kv_used": stats.kv_used,
        }

    async def __del__(self) -> None:
        """Ray has sent no request for a while: what is open still ends first."""
        if self._front is not None:
            await self._front.drain(self._server.drain_s)
        await self._opened.aclose()


def build(args: dict[str, str]) -> Application:
    """The application for `serve run`. `args`: options of `weft serve` with underscores, and
    `num_replicas`, `num_cpus`, `num_gpus` and `max_ongoing_requests` of Ray. Raises SettingsError.
    """
    words: list[str] = []
    for name, value in args.items():
        if name not in OF_RAY:
            words += [f"--{name.replace('_', '-')}", str(value)]
    settings = Command("weft.launch.ray:build", "", EngineConfig, ServerConfig).read(words, {})
    engine = settings.make(EngineConfig)
    server = settings.make(ServerConfig)
    threads = engine.threads * server.dp_size
    resources = {
        "num_cpus": float(args.get("num_cpus", threads or 1)),
        "num_gpus": float(args.get("num_gpus", 0)),
    }
    deploy = serve.deployment(
        health_check_period_s=HEALTH_PERIOD_S,
        num_replicas=int(args.get("num_replicas", 1)),
        max_ongoing_requests=int(args.get("max_ongoing_requests", MAX_ONGOING)),
        graceful_shutdown_timeout_s=server.drain_s + 10.0,
        ray_actor_options=resources,
    )
    return deploy(WeftReplica).bind(engine, server)
