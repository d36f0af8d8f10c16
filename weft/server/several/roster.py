"""What the application needs of the models of a server: their names, their states, and a model that
is loaded. The launcher implements it; a test does in a page.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from weft.residency.rules import Delay
from weft.server.app import ModelApp
from weft.server.context import ModelFacts, Readiness


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the server, whether or not it is in memory."""

    name: str
    aliases: tuple[str, ...] = ()
    is_default: bool = False
    # unloaded, loading, loaded, shrinking, sleeping (without KV), growing, unloading or failed
    state: str
    reason: str = ""  # why its last load failed
    pin: bool = False
    ttl_s: float = 0.0  # idle time after which it is unloaded; 0: none
    since_s: float = 0.0  # Unix time when the server began to offer it
    left_s: float | None = None  # until it is unloaded, if nobody asks; None: it stays
    num_open: int = 0
    num_waiting: int = 0
    delay: Delay | None = None  # if requests wait for it
    num_bytes: int = 0  # in memory now, at most
    full_bytes: int = 0  # when it is loaded; 0: not known yet
    kv_bytes: int = 0
    context_length: int = 0  # 0: not known yet
    task: str = "generate"
    facts: ModelFacts = ModelFacts()

    @property
    def is_loaded(self) -> bool:
        return self.state == "loaded"


class WaitingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits for its model."""

    rid: str
    model: str
    state: str = "loading"
    waited_s: float
    position: int  # models that are loaded before this one
    eta_s: float  # until its model is ready, as far as known


class Roster(Protocol):
    """All calls come from one event loop."""

    readiness: Readiness
    blank: ModelApp  # answers what concerns no model; it has no engine

    def find(self, asked: str) -> str:
        """The own name of the model that a request names; "" and "default" name the default.
        Raises `ApiError` 404."""
        ...

    def status(self) -> Sequence[ModelStatus]:
        """All models, the default first."""
        ...

    def served(self, name: str) -> ModelApp | None:
        """A model that is loaded; None if it is not."""
        ...

    def loaded(self) -> Mapping[str, ModelApp]:
        """All models that are loaded, by name."""
        ...

    def enter(self, asked: str) -> tuple[str, ModelApp] | None:
        """The own name of the model with this name or alias, "" is the default, and the model, if
        it is loaded and need not make room; it is kept until `done`. None: `find` and `use` it.
        Raises `ApiError` if the server ends."""
        ...

    async def use(self, name: str, rid: str) -> ModelApp:
        """Wait until a model is loaded, and keep it until `done`. Raises `ApiError` if it cannot be
        loaded, or if too many requests wait."""
        ...

    def done(self, name: str) -> None:
        """A request that `enter` or `use` let begin has ended."""
        ...

    def delay(self, name: str) -> Delay:
        """What a request that waits for a model can expect."""
        ...

    def waiting(self) -> Sequence[WaitingRequest]:
        """The requests that wait for their models."""
        ...

    def abort_waiting(self, names: Collection[str]) -> int:
        """End the requests with these names that wait for their models, or all if there are none.
        Returns their number."""
        ...

    async def load(self, name: str) -> None:
        """Load a model and wait until it is ready. Raises `ApiError`."""
        ...

    async def unload(self, name: str) -> None:
        """Unload a model once its open requests have ended, and wait for it."""
        ...

    async def remove(self, asked: str, remove_files: Callable[[str], Awaitable[None]]) -> None:
        """Offer the model with this name no longer, unload it after its open requests, and then
        call `remove_files` with its name. A name that the server does not offer is passed on.
        Raises `ApiError`, also 409 for a model that the settings of the server name."""
        ...

    def keep(self, name: str, idle_s: float) -> None:
        """Keep a model for this idle time from now on; negative: for ever; 0: no longer."""
        ...

    def page(self, *, is_open: bool) -> bytes:
        """The numbers of the server and of every model that was loaded once, as a page for
        Prometheus; `is_open`: in the OpenMetrics format."""
        ...
