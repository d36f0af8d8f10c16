"""What ranks of one model do together, over the libraries that come with torch.

gloo joins processes on CPUs, nccl those that have a GPU each. Ranks meet in a file, or where rank 0
listens; both are made by whoever starts them. Neither gloo nor nccl asks who connects: what they
listen on is for networks of the operator alone.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.ops.sharding import RankLost

KEY = "weft"  # before all keys of the store


class TorchComm:
    """One rank's end of a group of `size` ranks, by gloo or nccl."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        backend: str = "gloo",
        address: str = "127.0.0.1",
    ) -> None:
        """Join, which waits for all others, at most `timeout_s`; so does each later call. `address`
        of this machine is where gloo listens. Raises RankLost."""
        self.rank = rank
        self.size = size
        self._timeout = timedelta(seconds=timeout_s)
        try:
            self._group = self._join(store, backend, address)
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
        """Leave."""
        self._group = None

    def _wait(self, what: str, begin: Any) -> None:
        try:
            begin().wait(self._timeout)
        except (RuntimeError, ValueError) as exc:
            raise RankLost(
                f"rank {self.rank}: another rank did not take part in a {what}, or its connection "
                "broke"
            ) from exc

    def _join(self, store: Any, backend: str, address: str) -> Any:
        from torch import distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        keys = PrefixStore(KEY, store)
        if backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = self._timeout
            options._devices = [gloo.create_device(hostname=address)]
            return gloo(keys, self.rank, self.size, options)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = self._timeout
        return nccl(keys, self.rank, self.size, options)


def file_store(path: Path, size: int) -> Any:
    """Where ranks of one machine meet: a file that does not exist yet, in a private folder."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    return FileStore(str(path), size)


def listening_store(host: str, size: int, timeout_s: float) -> tuple[Any, int]:
    """Where ranks of several machines meet: this one listens on one of its addresses, and on no
    other. Returns the store and its port. Raises OSError."""
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
    """The same for all other ranks. Raises RankLost."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as exc:
        raise RankLost(f"rank 0 was not reached at {host}:{port} within {timeout_s:g} s") from exc


def address_towards(host: str) -> str:
    """The address of this machine from which `host` is reached. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
