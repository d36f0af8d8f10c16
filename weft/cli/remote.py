"""The connection of `weft chat --url` and `weft ctl` to a running server, with the standard
library's HTTP.

It does not know the requests, and of the answers it understands only the text of a chat.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

from weft.bench.error_text import error_text
from weft.cli.chat_backend import ChatError
from weft.config.options import SettingsError
from weft.config.server_url import server_url
from weft.json_types import JsonObject

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 600.0
LOADING_TIMEOUT_S = 600.0
LOOK_AGAIN_S = 0.5
EVENT = b"data: "


class ServedModel(NamedTuple):
    name: str
    context_length: int  # 0: the server does not say


class RemoteServer:
    """The address of a server, and the key for it."""

    def __init__(self, url: str, key: str = "") -> None:
        """Raises SettingsError if `url` is not a URL."""
        parts = server_url("--url", url)
        self.address = parts.netloc
        self.scheme = parts.scheme
        self.path = parts.path.rstrip("/").removesuffix("/v1")  # prefix of all its routes
        self.headers = {"content-type": "application/json"}
        if key:
            self.headers["authorization"] = f"Bearer {key}"

    @property
    def url(self) -> str:
        """The address in full, without `/v1`."""
        return f"{self.scheme}://{self.address}{self.path}"

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.scheme == "https":
            return http.client.HTTPSConnection(self.address, timeout=timeout_s)
        return http.client.HTTPConnection(self.address, timeout=timeout_s)

    def missing(self, exc: OSError) -> SettingsError:
        """The error for an address where no server listens."""
        reason = exc.strerror or str(exc)
        message = f"no server answers at {self.address} ({reason}); weft serve starts one"
        return SettingsError(message)


class RemoteChatBackend:
    """A server that answers, with the same sampling fields in each request."""

    def __init__(self, url: str, api_key: str, sampling: Mapping[str, Any]) -> None:
        """Raises SettingsError if there is no server at `url`, or no OpenAI API."""
        self._server = RemoteServer(url, api_key)
        self._path = self._server.path + "/v1"
        self._body = {"stream": True, **sampling}
        self.name = served_models(self._server)[0].name

    def answer(self, messages: list[JsonObject]) -> Generator[str, None, None]:
        """See `ChatBackend.answer`.

        Closing the generator closes the connection, and that ends the request in the server.
        """
        body = json.dumps({**self._body, "model": self.name, "messages": messages})
        path = f"{self._path}/chat/completions"
        with closing(self._server.connect(ANSWER_TIMEOUT_S)) as connection:
            try:
                connection.request("POST", path, body, self._server.headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise ChatError(error_of(response))
                for line in response:
                    if line.startswith(EVENT + b"{"):  # the last event is not an object
                        yield _text(json.loads(line.removeprefix(EVENT)))
            except (OSError, http.client.HTTPException, ValueError) as exc:
                message = f"the connection to {self._server.address} broke: {exc}"
                raise ChatError(message) from exc


def served_models(server: RemoteServer) -> list[ServedModel]:
    """The models of a server, at least one. Waits while it loads. Raises SettingsError."""
    deadline_s = time.monotonic() + LOADING_TIMEOUT_S
    has_warned = False
    while True:
        found = _models_now(server)
        if found:
            return found
        if time.monotonic() > deadline_s:
            raise SettingsError(f"{server.address} is not ready yet")
        if not has_warned:
            print(f"{server.address} is not ready yet; waiting", file=sys.stderr)
            has_warned = True
        time.sleep(LOOK_AGAIN_S)


def _models_now(server: RemoteServer) -> list[ServedModel]:
    """The models of a server; none while it loads. Raises SettingsError."""
    address = server.address
    with closing(server.connect(CONNECT_TIMEOUT_S)) as connection:
        try:
            connection.request("GET", f"{server.path}/v1/models", headers=server.headers)
            response = connection.getresponse()
            if response.status == 503:
                return []
            if response.status in (401, 403):
                raise SettingsError(f"{address} refuses access: {no_access(response)}")
            if response.status != 200:
                raise SettingsError(f"{address} lists no model: {error_of(response)}")
            models = json.load(response)["data"]
            found = [
                ServedModel(str(one["id"]), int(one.get("max_model_len", 0))) for one in models
            ]
            if not found:
                raise SettingsError(f"{address} lists no model")
            return found
        except SettingsError:  # a ValueError, too
            raise
        except OSError as exc:
            raise server.missing(exc) from exc
        except (http.client.HTTPException, ValueError, LookupError, TypeError) as exc:
            raise SettingsError(f"{address} does not speak the OpenAI API") from exc


def _text(event: JsonObject) -> str:
    """The text in one event of the stream. Raises ChatError for an error event."""
    if "error" in event:
        raise ChatError(str(event["error"].get("message", "the server reports an error")))
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return delta.get("content") or ""


def error_of(response: http.client.HTTPResponse) -> str:
    """The server's error message."""
    return error_text(response.read(100_000), f"status {response.status} {response.reason}")


def no_access(response: http.client.HTTPResponse) -> str:
    """The server's error message to who has no key or a wrong one, and how to give one."""
    return f"{error_of(response)}; --api-key KEY or WEFT_API_KEY gives one"
