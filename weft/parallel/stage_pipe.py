"""Sends the activations of a step's tokens from one stage to the next, over a pair of sockets that
only the two processes have. The end of either process closes the pipe at once."""

from __future__ import annotations

import socket
import struct

import torch
from torch import Tensor

from weft.ops.sharding import RankLost
from weft.parallel.peers import read_exactly, read_into

HEADER = struct.Struct("<Q")  # bytes that follow


class SocketPipe:
    """One stage's ends of the pipes to the previous stage and to the next one."""

    def __init__(
        self, before: socket.socket | None, after: socket.socket | None, timeout_s: float
    ) -> None:
        """`timeout_s`: how long a call waits for a neighbour."""
        self._before = before
        self._after = after
        for end in (before, after):
            if end is not None:
                end.settimeout(timeout_s)

    def give(self, x: Tensor) -> None:
        assert self._after is not None, "nobody follows the last stage"
        content = _bytes_of(x)
        try:
            self._after.sendall(HEADER.pack(len(content)))
            self._after.sendall(content)
        except OSError as exc:
            raise RankLost("the next stage takes nothing any more") from exc

    def take(self, x: Tensor) -> None:
        assert self._before is not None, "nobody stands before the first stage"
        content = _bytes_of(x)
        try:
            (num_bytes,) = HEADER.unpack(read_exactly(self._before, HEADER.size))
            if num_bytes != len(content):
                raise RankLost("the stage before has computed another step")
            read_into(self._before, content)
        except ConnectionError as exc:
            raise RankLost("the stage before has ended") from exc
        except OSError as exc:
            raise RankLost("the stage before has not come with a step") from exc

    def wake(self) -> None:
        """A neighbour is lost: end all waits for it. May be called on any thread."""
        for end in (self._before, self._after):
            if end is not None:
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self._before, self._after):
            if end is not None:
                end.close()


def _bytes_of(x: Tensor) -> memoryview:
    assert x.is_contiguous()
    assert x.dtype == torch.float32
    content: memoryview = x.numpy().data
    return content.cast("B")
