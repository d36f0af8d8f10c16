"""A replica of Ray Serve whose model is on several machines (`nnodes`). The replica is node 0; Ray
places each following node on another machine.

    placement group ─┬─ the replica: front, engine, ranks of node 0
                     ├─ FollowingNode ── weft serve --node-rank 1
                     └─ ...

This module chooses the address of node 0 and the nodes' secret, new ones for each replica. A node
ends when node 0 ends; Ray ends the actors with the replica.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from weft.config.engine import EngineConfig
from weft.config.options import SettingsError

STOP_S = 5.0  # time for a node to end by itself


def check_machines(engine: EngineConfig) -> None:
    """Raise SettingsError if the settings give addresses or ranks that Ray and the replica choose,
    or if `nnodes` does not divide `tp_size`."""
    for option, value in (
        ("node_rank", engine.node_rank),
        ("dist_init_addr", engine.dist_init_addr),
        ("dist_secret", engine.dist_secret),
    ):
        if value:
            raise SettingsError(f"{option} is given, but Ray gives the nodes their places")
    if engine.tp_size % engine.nnodes:
        raise SettingsError(
            f"nnodes is {engine.nnodes}, which does not divide tp_size ({engine.tp_size}): each "
            "node must have the same number of ranks"
        )


class FollowingNode:
    """A following node: a child process of this process, which is an actor of Ray."""

    def __init__(self, words: Sequence[str], secret: str) -> None:
        command = [sys.executable, "-m", "weft", "serve", *words]
        environment = {**os.environ, "WEFT_DIST_SECRET": secret}
        self._process = subprocess.Popen(command, env=environment)

    def stop(self) -> None:
        """Wait until the node ends, which it does when node 0 has ended; kill it after `STOP_S`."""
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


NODE_ACTOR: Any = ray.remote(FollowingNode)


class OtherMachines:
    """The nodes that follow a replica. The replica's placement group has a bundle for each node."""

    def __init__(self, engine: EngineConfig, words: Sequence[str], num_cpus: float) -> None:
        """Start the nodes. `words`: the settings as options of `weft serve`."""
        host = get_node_ip_address()
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
        secret = secrets.token_hex(32)
        address = f"{host}:{port}"
        self.engine = replace(engine, dist_init_addr=address, dist_secret=secret)
        self._actors = []
        for node in range(1, engine.nnodes):
            strategy = PlacementGroupSchedulingStrategy(
                get_current_placement_group(), placement_group_bundle_index=node
            )
            # Any port: several replicas may have nodes on one machine, and Ray asks none of them.
            own = [*words, "--node-rank", str(node), "--dist-init-addr", address, "--port", "0"]
            actor = NODE_ACTOR.options(num_cpus=num_cpus, scheduling_strategy=strategy)
            self._actors.append(actor.remote(own, secret))

    async def close(self) -> None:
        """Wait until the nodes have ended. Node 0 has ended before."""
        for actor in self._actors:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(actor.stop.remote(), 2 * STOP_S)
            ray.kill(actor)
