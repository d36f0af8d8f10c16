"""Collective operations of the ranks of one model, with the libraries that come with torch.

gloo joins processes on CPUs. Ranks meet through a file, or at an address where rank 0 listens; the
process that starts them creates both. gloo does not authenticate connections: its ports must be
reachable from the operator's network only.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.ops.sharding import RankLost

KEY = "weft"  # prefix of all keys of the store


class TorchComm:
    """One rank's end of a group of `size` ranks, by gloo."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        address: str = "127.0.0.1",
    ) -> None:
        """Join the group. This and each later call wait for all other ranks, at most `timeout_s`.
        It listens on `address` of this machine. Raises RankLost."""
        self.rank = rank
        self.size = size
        self._timeout = timedelta(seconds=timeout_s)
        try:
            self._group = self._join(store, address)
        except (RuntimeError, ValueError) as exc:
            raise RankLost(
                f"rank {rank}: the {size} ranks did not come together within {timeout_s:g} s"
            ) from exc

    def all_reduce(self, x: Tensor) -> None:
        from torch.distributed import AllreduceOptions

        options = AllreduceOptions()
        options.timeout = self._timeout
        self._wait("sum", lambda: self._group.allreduce([x], options))

    def gather(self, x: Tensor) -> Tensor | None:
        from torch.distributed import GatherOptions

        options = GatherOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        if self.rank:
            self._wait("gather", lambda: self._group.gather([], [x], options))
            return None
        found = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self._wait("gather", lambda: self._group.gather([list(found)], [x], options))
        return found

    def close(self) -> None:
        """Leave the group."""
        self._group = None

    def _wait(self, what: str, begin: Any) -> None:
        try:
            begin().wait(self._timeout)
        except (RuntimeError, ValueError) as exc:
            raise RankLost(
                f"rank {self.rank}: another rank did not take part in a {what}, or its connection "
                "broke"
            ) from exc

    def _join(self, store: Any, address: str) -> Any:
        from torch import distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        keys = PrefixStore(KEY, store)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._timeout
        options._devices = [gloo.create_device(hostname=address)]
        return gloo(keys, self.rank, self.size, options)


def file_store(path: Path, size: int) -> Any:
    """The meeting point of ranks on one machine: a file that does not exist yet, in a private
    folder."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    return FileStore(str(path), size)


def listening_store(host: str, size: int, timeout_s: float) -> tuple[Any, int]:
    """The meeting point of ranks on several machines, for rank 0: it listens on one address of this
    machine only. Returns the store and its port. Raises OSError."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # The store closes it.
        master_listen_fd=listener.detach(),
    )
    return store, port


def calling_store(host: str, port: int, size: int, timeout_s: float) -> Any:
    """The same meeting point for all other ranks. Raises RankLost."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as exc:
        raise RankLost(f"rank 0 was not reached at {host}:{port} within {timeout_s:g} s") from exc


def address_towards(host: str) -> str:
    """The address of this machine from which `host` is reached. No data is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
