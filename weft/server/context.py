"""The objects that handlers use: client, tokenizer, limits, and fixed facts about the server.

A record without rules: `requests.py` has the rules for the use of these objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.batches.service import BatchService
from weft.client.adapters import AdapterLoader, AdapterNames
from weft.client.client import EngineClient
from weft.client.feed import Feed
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.messages.sampling import SamplingParams
from weft.server.catalog import ModelCatalog, OpenPulls
from weft.server.media import ServedMedia
from weft.server.refusals import RefusalLog
from weft.server.response_store import ResponseStore
from weft.server.session_store import SessionStore
from weft.state.store import StateStore
from weft.text.infill import Infill
from weft.text.parsers.formats import Formats
from weft.text.templates.renderer import Renderer
from weft.text.tokenizer import Tokenizer
from weft.text.turns import Workers


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about the model for clients that list models. Zero or empty: not known."""

    family: str = ""  # "qwen3"
    format: str = ""  # of its files: safetensors or gguf
    num_parameters: int = 0
    quantization: str = ""  # of the stored weights: "Q4_K_M", "BF16"
    folder: str = ""  # with its files
    size_bytes: int = 0  # of the files
    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """Facts that do not change while the server runs."""

    model_name: str  # the name in the API
    aliases: tuple[str, ...] = ()  # other names by which requests may name the model
    context_length: int
    version: str
    started_at: float  # Unix time
    model_summary: str = ""
    # Defaults for requests that do not set them.
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)
    journals: tuple[str, ...] = ()  # files that engines write, by rank
    model: ModelFacts = ModelFacts()
    # Settings of the engine, for /server_info; without secrets.
    settings: Mapping[str, Any] = field(default_factory=dict)


class Readiness:
    """Whether the server accepts new work. Only the launcher writes it; all handlers read it."""

    def __init__(self) -> None:
        self.accepting = False
        self.draining = False
        self._at_ready: list[Callable[[], None]] = []
        self._at_drain: list[Callable[[], None]] = []
        self._at_end: list[Callable[[], None]] = []

    def at_ready(self, call: Callable[[], None]) -> None:
        """`call` begins work that the server does by itself, as soon as requests are accepted."""
        self._at_ready.append(call)

    def at_drain(self, call: Callable[[], None]) -> None:
        """`call` ends work for requests that have not reached the engine: all are refused."""
        self._at_drain.append(call)

    def at_end(self, call: Callable[[], None]) -> None:
        """`call` frees what the application holds: nothing is answered any more."""
        self._at_end.append(call)

    def mark_ready(self) -> None:
        self.accepting = not self.draining
        if self.accepting:
            for call in self._at_ready:
                call()

    def drain(self) -> None:
        """Open requests continue, new requests are refused."""
        self.draining = True
        self.accepting = False
        for call in self._at_drain:
            call()

    def end(self) -> None:
        for call in self._at_end:
            call()


def _no_batches() -> BatchService:
    return BatchService(Limits())


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """The objects that handlers use."""

    client: EngineClient
    tokenizer: Tokenizer
    template: Renderer | None
    config: ServerConfig
    info: ServerInfo
    readiness: Readiness
    adapters: AdapterNames
    loader: AdapterLoader
    feed: Feed  # for viewers of the live page
    readers: Workers  # of bodies
    writers: Workers  # of answers
    has_keys: bool = False  # whether requests carry a key
    media: ServedMedia | None = None  # None: the model takes only text
    limits: Limits = field(default_factory=Limits)
    responses: ResponseStore = field(default_factory=ResponseStore)
    state: StateStore | None = None  # None: nothing outlives the server
    batches: BatchService = field(default_factory=_no_batches)
    sessions: SessionStore | None = None
    refusals: RefusalLog = field(default_factory=RefusalLog)
    catalog: ModelCatalog | None = None  # the models on this machine; None: nobody asks for them
    pulls: OpenPulls = field(default_factory=OpenPulls)
    infill: Infill | None = None  # the tokens of fill-in-the-middle
    # How the model writes tool calls and reasoning.
    formats: Formats = field(default_factory=Formats)
