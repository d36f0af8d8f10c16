"""What the server knows of itself: fixed facts, its readiness, and the parts that handlers work with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.client.client import EngineClient
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.messages.sampling import SamplingParams
from weft.server.errors import ApiError
from weft.server.openai.responses.store import ResponseStore
from weft.text.infill import Infill
from weft.text.parsers.formats import Formats
from weft.text.templates.renderer import Renderer
from weft.text.tokenizer import Tokenizer
from weft.text.turns import Workers

DEFAULT_MODEL = "default"  # what clients made for SGLang call the model that is served
WRITER_WAIT_S = 600.0  # what has been generated is not thrown away because others are written first


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """Facts that do not change while the server runs."""

    model_name: str  # in the API
    context_length: int
    version: str
    started_at: float  # Unix time
    model_summary: str = ""
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen): what a request gets that does not say otherwise
    settings: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the engine, for /server_info; without secrets


class Readiness:
    """Whether new work is accepted. Written by the launcher alone, read by all handlers."""

    def __init__(self) -> None:
        self._ready = False
        self._draining = False

    def mark_ready(self) -> None:
        self._ready = True

    def drain(self) -> None:
        """Open requests go on, new ones are refused."""
        self._draining = True

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def accepting(self) -> bool:
        return self._ready and not self._draining


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """The parts that handlers work with."""

    client: EngineClient
    tokenizer: Tokenizer
    template: Renderer | None
    config: ServerConfig
    info: ServerInfo
    readiness: Readiness
    limits: Limits = field(default_factory=Limits)
    responses: ResponseStore = field(default_factory=ResponseStore)
    readers: Workers = field(default_factory=lambda: Workers(2, "the reader of bodies"))
    infill: Infill | None = None  # the tokens by which the model fills in the middle
    writers: Workers = field(
        default_factory=lambda: Workers(2, "the writer of answers", wait_s=WRITER_WAIT_S)
    )
    formats: Formats = field(
        default_factory=Formats
    )  # in which the model writes calls and reasoning

    def require_accepting(self) -> None:
        """Raise `ApiError` 503 if new work is refused."""
        if not self.readiness.accepting:
            what = "shutting down" if self.readiness.draining else "not ready yet"
            raise ApiError(503, f"the server is {what}", headers={"retry-after": "1"})

    def require_model(self, model: str | None) -> None:
        """Raise `ApiError` 404 unless `model` is the served one, not given, or any name will do."""
        if self.config.any_model_name or model in (None, "", DEFAULT_MODEL):
            return
        if model != self.info.model_name:
            raise ApiError(
                404,
                f"the model {model[:128]!r} does not exist; this server has {self.info.model_name!r}",
                param="model",
                code="model_not_found",
            )
