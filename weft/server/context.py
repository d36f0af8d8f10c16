"""The objects that handlers use: client, tokenizer, limits, and fixed facts about the server.

A record without rules: `submit.py` has the rules for the use of these objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.client.adapters import AdapterLoader, AdapterNames
from weft.client.client import EngineClient
from weft.client.feed import Feed
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.messages.sampling import SamplingParams
from weft.server.media import ServedMedia
from weft.server.refusals import RefusalLog
from weft.server.response_store import ResponseStore
from weft.text.infill import Infill
from weft.text.parsers.formats import Formats
from weft.text.templates.renderer import Renderer
from weft.text.tokenizer import Tokenizer
from weft.text.turns import Workers

# A finished answer is not thrown away because other answers are written first.
WRITER_WAIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """Facts that do not change while the server runs."""

    model_name: str  # the name in the API
    context_length: int
    version: str
    started_at: float  # Unix time
    model_summary: str = ""
    # Defaults for requests that do not set them.
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)
    journals: tuple[str, ...] = ()  # files that engines write, by rank
    # Settings of the engine, for /server_info; without secrets.
    settings: Mapping[str, Any] = field(default_factory=dict)


class Readiness:
    """Whether the server accepts new work. Only the launcher writes it; all handlers read it."""

    def __init__(self) -> None:
        self.accepting = False
        self.draining = False

    def mark_ready(self) -> None:
        self.accepting = not self.draining

    def drain(self) -> None:
        """Open requests continue, new requests are refused."""
        self.draining = True
        self.accepting = False


def _make_readers() -> Workers:
    return Workers(2, "the reader of bodies")


def _make_writers() -> Workers:
    return Workers(2, "the writer of answers", wait_s=WRITER_WAIT_S)


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
    has_keys: bool = False  # whether requests carry a key
    media: ServedMedia | None = None  # None: the model takes only text
    limits: Limits = field(default_factory=Limits)
    responses: ResponseStore = field(default_factory=ResponseStore)
    refusals: RefusalLog = field(default_factory=RefusalLog)
    readers: Workers = field(default_factory=_make_readers)
    writers: Workers = field(default_factory=_make_writers)
    infill: Infill | None = None  # the tokens of fill-in-the-middle
    # How the model writes tool calls and reasoning.
    formats: Formats = field(default_factory=Formats)
