"""A group of processes in which a trainer, rank 0, sends weights to engines.

It is separate from torch's default group. Its ranks meet in a TCP store that rank 0 opens, under
the keys that `torch.distributed.distributed_c10d._new_process_group_helper` uses for a group whose
store has the prefix of its name; so trainers that make such groups for other engines can send to
this one.

    TCPStore at host:port ── "<name>" ── "<name>/" ── "cpu/" or "cuda/" ── the backend's own keys

An engine only connects to the store. gloo listens on the address from which rank 0 is reached.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from weft.parallel.comm import address_towards

BACKENDS = {"gloo": "cpu", "nccl": "cuda"}  # with the device type of its tensors
RETRY_S = 0.1  # between two attempts to reach rank 0


class GroupError(Exception):
    """The group cannot be created, or has failed. The message names no address."""


class UpdateGroup:
    """One rank's end of the group."""

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float,
    ) -> None:
        """Join the group; waits for all others, at most `timeout_s`. Raises GroupError."""
        self.name = name
        self.device = torch.device(BACKENDS[backend])
        self._timeout = timedelta(seconds=timeout_s)
        try:
            if rank:
                # Torch would wait, too, but fill the log in the meantime.
                _await_listener(host, port, timeout_s)
            self._store, self._group = self._join(
                host,
                port,
                rank,
                world_size,
                backend,
            )
        except (
            RuntimeError,
            ValueError,
            OSError,
        ) as exc:  # of torch: of every kind, with addresses in their texts
            raise GroupError(
                f"the group {name!r} did not come together within {timeout_s:g} s"
            ) from exc

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor (rank 0) or receive into it. Raises GroupError; then the group cannot be
        used any more."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        try:
            self._group.broadcast([tensor], options).wait(self._timeout)
        except (RuntimeError, ValueError) as exc:
            seconds = self._timeout.total_seconds()
            raise GroupError(
                f"the group {self.name!r} broke, or nothing came within {seconds:g} s"
            ) from exc

    def close(self) -> None:
        """Leave the group."""
        self._group = self._store = None

    def _join(
        self, host: str, port: int, rank: int, world_size: int, backend: str
    ) -> tuple[Any, Any]:
        """The store, which the group uses as long as it exists, and the group."""
        from torch import distributed as dist
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        store = TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0,
            timeout=self._timeout,
        )
        keys = PrefixStore(f"{self.name}/", PrefixStore(self.name, store))
        keys = PrefixStore(f"{self.device.type}/", keys)
        if backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = self._timeout
            options._devices = [gloo.create_device(hostname=address_towards(host))]
            return store, gloo(keys, rank, world_size, options)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = self._timeout
        return store, nccl(keys, rank, world_size, options)


def _await_listener(host: str, port: int, timeout_s: float) -> None:
    """Wait until a process listens there. Raises OSError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
            return
        except OSError:
            if time.monotonic() + RETRY_S >= deadline:
                raise
        time.sleep(RETRY_S)
