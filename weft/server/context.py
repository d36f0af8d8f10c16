"""The parts that handlers work with, and the owner of a request.

`ServerContext` holds fixed facts, readiness, client, tokenizer and limits.
A request belongs to the API key that it came with. A key goes by its name, never by itself
(`config/keys.py`). Sessions and stored responses belong to a key. A client
cannot invent a key, so it gains nothing by names of its own, unless the operator lets the `user` of
a request count (`--tenant-by user`). This module reads no body and writes no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from weft.client.client import EngineClient
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.messages.sampling import SamplingParams
from weft.server.errors import ApiError
from weft.server.response_store import ResponseStore
from weft.text.infill import Infill
from weft.text.parsers.formats import Formats
from weft.text.templates.renderer import Renderer
from weft.text.tokenizer import Tokenizer
from weft.text.turns import Workers

DEFAULT_MODEL = "default"  # what clients made for SGLang call the model that is served
# What has been generated is not thrown away because others are written first.
WRITER_WAIT_S = 600.0
KEY_END = "\x1e"  # stands in no name of a key


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """Facts that do not change while the server runs."""

    model_name: str  # in the API
    context_length: int
    version: str
    started_at: float  # Unix time
    model_summary: str = ""
    # What a request gets that does not say otherwise.
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)
    # Of the engine, for /server_info; without secrets.
    settings: Mapping[str, Any] = field(default_factory=dict)


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


def _make_readers() -> Workers:
    return Workers(2, "the reader of bodies")


def _make_writers() -> Workers:
    return Workers(2, "the writer of answers", wait_s=WRITER_WAIT_S)


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
    readers: Workers = field(default_factory=_make_readers)
    writers: Workers = field(default_factory=_make_writers)
    infill: Infill | None = None  # the tokens by which the model fills in the middle
    # How the model writes calls and reasoning.
    formats: Formats = field(default_factory=Formats)

    def require_accepting(self) -> None:
        """Raise `ApiError` 503 if new work is refused."""
        if not self.readiness.accepting:
            what = "shutting down" if self.readiness.draining else "not ready yet"
            raise ApiError(503, f"the server is {what}", headers={"retry-after": "1"})

    def require_model(self, model: str | None) -> None:
        """Raise `ApiError` 404 unless `model` is the served one, not given, or any name will do."""
        if self.config.any_model_name or model in (None, "", DEFAULT_MODEL):
            return
        own_name = self.info.model_name
        if model != own_name:
            message = f"the model {model[:128]!r} does not exist; this server has {own_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


def owner_of(request: Request) -> str:
    """The name of the key that came; empty for all where no key is asked for."""
    return str(request.scope.get("weft.key", ""))


def tenant_of(context: ServerContext, request: Request, user: str) -> str:
    """The tenant that the policy `fair` serves with the request. `user`: as the request says."""
    key = owner_of(request)
    if context.config.tenant_by == "key" or not user:
        return key
    return f"{key}/{user}" if key else user


def cache_salt_of(
    context: ServerContext, request: Request, salt: str | None = None, extra_key: str | None = None
) -> str:
    """The name of the part of the prefix cache that a request may share.

    SGLang's `extra_key` does the same as `cache_salt`; a request with both shares with those that
    have both. If the server isolates keys, a request shares within its key only.
    """
    name = salt or ""
    if extra_key:
        name = f"{name}\x1f{extra_key}"
    if context.config.isolate_cache_by_key:
        return f"{owner_of(request)}{KEY_END}{name}"
    return name
