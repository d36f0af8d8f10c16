"""The models on the machine of a server, as Ollama's routes need them. `launch` brings an
implementation; this module knows neither files nor the hub."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol


class CatalogModel(NamedTuple):
    """Facts of a model's files. Zero or empty: not known."""

    name: str
    size_bytes: int
    modified_at: float  # seconds since 1970
    format: str
    family: str
    num_parameters: int
    quantization: str
    context_length: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    template: str
    license: str
    digest: str  # SHA-256 of the weights; "": it was not asked for


class PullState(NamedTuple):
    """How far a pull is."""

    status: str
    digest: str = ""  # of the file that comes
    total_bytes: int = 0
    done_bytes: int = 0


class OpenPulls:
    """The pulls of one server."""

    def __init__(self) -> None:
        self.num = 0


class CatalogError(Exception):
    """It cannot be done; the message gives the reason."""


class NoSuchModel(CatalogError):
    """The catalog has no model with this name."""


class ModelCatalog(Protocol):
    """Every call may take long, and runs in a thread."""

    def show(self, name: str) -> CatalogModel:
        """Raises NoSuchModel and CatalogError."""
        ...

    def facts(self, name: str) -> CatalogModel:
        """As `show`, without the digest, for which files may have to be read from end to end.
        Raises NoSuchModel and CatalogError."""
        ...

    def digest(self, folder: str) -> str:
        """SHA-256 of the weights in a folder, or of a GGUF file; "": they cannot be read."""
        ...

    def pull(
        self, name: str, report: Callable[[PullState], None], stopped: threading.Event
    ) -> None:
        """Fetch a model. What has come stays if `stopped` is set. Raises CatalogError."""
        ...

    def delete(self, name: str) -> None:
        """Raises NoSuchModel, and CatalogError, also for a model that a process computes with."""
        ...

    def copy(self, source: str, destination: str) -> None:
        """Raises NoSuchModel and CatalogError."""
        ...
