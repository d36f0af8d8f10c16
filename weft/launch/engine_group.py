"""The engine processes of a server: one, or several replicas of the same model.

The group starts the processes immediately: they import their modules before the model and the
settings are known. It knows nothing of the messages between engines and front.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from weft.config.engine import EngineConfig
from weft.config.engine_args import EngineArgs
from weft.config.handoff import PREFILL
from weft.config.kv_events import check_ports, of_engine
from weft.config.kv_transfer import with_kv_transfer_config
from weft.config.machine import Machine
from weft.config.options import SettingsError
from weft.launch.context import LaunchContext
from weft.launch.engine_process import (
    RPC_SOCKET,
    EngineProcess,
    SocketFolder,
)

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class EngineGroup:
    """`processes[rank]` is the process of engine `rank`; one that has ended can be replaced."""

    def __init__(self, num_engines: int, *, are_joined: bool = False) -> None:
        """Start the processes. They wait for `begin`. `are_joined`: each engine has a link to every
        other engine, and none can be replaced."""
        self.processes: list[EngineProcess] = []
        self.are_joined = are_joined
        self._context: LaunchContext | None = None
        self._sockets: SocketFolder | None = None
        self._num_starts = [0] * num_engines
        # [rank]: the file descriptors of the engine's ends of its links.
        self._links: list[tuple[int, ...]] = [()] * num_engines
        ends: list[dict[int, socket.socket]] = [{} for _ in range(num_engines)]
        if are_joined:
            ends = socket_pairs(num_engines)
        for rank, own in enumerate(ends):
            files = {other: end.fileno() for other, end in own.items()}
            if are_joined:
                self._links[rank] = tuple(files.get(other, -1) for other in range(num_engines))
            process = EngineProcess(environment(rank, num_engines), list(files.values()))
            self.processes.append(process)
        for own in ends:
            for end in own.values():
                end.close()  # so that the links of an engine close when it ends

    def begin(self, context: LaunchContext, sockets: SocketFolder) -> None:
        """Send every process the model and the settings to serve."""
        self._context = context
        self._sockets = sockets
        for rank in range(len(self.processes)):
            self._begin(rank)

    def start_again(self, rank: int) -> EngineProcess:
        """Replace a process that has ended."""
        self.processes[rank] = EngineProcess(environment(rank, len(self.processes)))
        self._num_starts[rank] += 1
        self._begin(rank)
        return self.processes[rank]

    def stop(self, timeout_s: float) -> None:
        """Stop all processes; kill each one that takes longer than `timeout_s`."""
        for process in self.processes:
            process.hang_up()
        for process in self.processes:
            process.stop(timeout_s)

    def _begin(self, rank: int) -> None:
        assert self._context is not None, "it is not known what is served"
        assert self._sockets is not None
        sockets = self._sockets
        config = self._context.config
        mark = _mark(rank, len(self.processes))
        start = f"{mark}.{self._num_starts[rank]}"  # the front has sockets for every start
        args = EngineArgs(
            config=_config_of(self._context.prepared.config, mark, rank),
            folder=str(self._context.prepared.folder),
            to_engine=sockets.address(f"to_engine{start}"),
            from_engine=sockets.address(f"from_engine{start}"),
            rpc=sockets.address(f"{RPC_SOCKET}{mark}"),
            log_level=config.log_level,
            log_format=config.log_format,
            peers=self._links[rank],
        )
        self.processes[rank].begin(args)


def journals(config: EngineConfig, num_engines: int) -> tuple[str, ...]:
    """The journal file of each engine, by rank; empty if the engines do not record."""
    if not config.journal:
        return ()
    path = Path(config.journal).absolute()
    return tuple(f"{path}{_mark(rank, num_engines)}" for rank in range(num_engines))


def _mark(rank: int, num_engines: int) -> str:
    """The suffix of file and socket names that belong to one engine."""
    return f".dp{rank}" if num_engines > 1 else ""


def socket_pairs(num: int) -> list[dict[int, socket.socket]]:
    """Link `num` processes in pairs. Returns each process's ends: {other process: socket}."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(num)]
    for one in range(num):
        for other in range(one + 1, num):
            ends[one][other], ends[other][one] = socket.socketpair()
    return ends


def _config_of(config: EngineConfig, mark: str, rank: int) -> EngineConfig:
    """The settings of one engine, with its own files and ports where engines cannot share them."""
    if config.journal:
        config = replace(config, journal=f"{config.journal}{mark}")
    if config.kv_events_config:
        config = replace(config, kv_events_config=of_engine(config.kv_events_config, rank))
    return config


def environment(rank: int, num_engines: int) -> dict[str, str]:
    """The environment of an engine process. If there are several engines, each sees one GPU."""
    found = dict(os.environ)
    if num_engines > 1:
        visible = found.get(VISIBLE_GPUS)
        gpus = [str(rank)] if visible is None else visible.split(",")[rank : rank + 1]
        found[VISIBLE_GPUS] = ",".join(gpus)
    return found


def part_of(machine: Machine, num_engines: int, engine: EngineConfig) -> Machine:
    """One engine's share of a machine: an equal part of the cores and of the free memory. Raises
    SettingsError if there are fewer GPUs than engines, or if a setting allows only one engine."""
    num_gpus = len(machine.gpus)
    if num_engines == 1:
        return machine
    check_ports(engine.kv_events_config, num_engines)
    if with_kv_transfer_config(engine).disaggregation_mode == PREFILL:
        raise SettingsError(
            f"--dp-size is {num_engines}, but --disaggregation-mode {PREFILL} "
            "is for one engine, which others know by one port: start several servers"
        )
    if engine.nnodes > 1:
        raise SettingsError(
            f"--dp-size is {num_engines}, but the ranks of --nnodes {engine.nnodes} are those of "
            "one engine: start several servers"
        )
    if num_gpus and engine.device != "cpu" and num_gpus < num_engines:
        raise SettingsError(
            f"--dp-size is {num_engines}, and torch can use {num_gpus} of this machine's GPUs: "
            "each engine needs one of its own (--device cpu computes without)"
        )
    return replace(
        machine,
        cores=max(machine.cores // num_engines, 1),
        free_bytes=machine.free_bytes // num_engines,
    )
