"""The groups of processes that send new weights, by name."""

from __future__ import annotations

import torch

from weft.parallel.update_group import BACKENDS, GroupError, UpdateGroup
from weft.plan.device import JoinGroup

MAX_GROUPS = 8


class UpdateGroups:
    """`device`: where the model is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_name: dict[str, UpdateGroup] = {}

    def join(self, request: JoinGroup) -> None:
        """Raises GroupError."""
        if request.name in self._by_name:
            raise GroupError(f"the group {request.name[:64]!r} is joined already")
        if len(self._by_name) >= MAX_GROUPS:
            raise GroupError(
                f"{len(self._by_name)} groups are joined, no more are allowed; destroy one"
            )
        if request.backend not in BACKENDS:
            raise GroupError(
                f"the backend is {request.backend[:64]!r}; {', '.join(BACKENDS)} are allowed"
            )
        if BACKENDS[request.backend] == "cuda" and self._device.type != "cuda":
            raise GroupError(
                f"the backend is {request.backend}, but this engine computes on a CPU; use gloo"
            )
        if not 0 < request.rank < request.world_size:
            raise GroupError(
                f"the rank is {request.rank}; 1 to {request.world_size - 1} are expected, "
                "0 is the sender"
            )
        self._by_name[request.name] = UpdateGroup(
            request.name,
            request.host,
            request.port,
            rank=request.rank,
            world_size=request.world_size,
            backend=request.backend,
            timeout_s=request.timeout_s,
        )

    def leave(self, name: str) -> None:
        """Raises GroupError."""
        self._by_name.pop(self.of(name).name).close()

    def of(self, name: str) -> UpdateGroup:
        """The group of this name. Raises GroupError."""
        if name not in self._by_name:
            there = ", ".join(map(repr, self._by_name)) or "none"
            raise GroupError(f"no group {name[:64]!r} is joined; joined are: {there}")
        return self._by_name[name]
