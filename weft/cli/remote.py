"""The other end of `weft chat --url` and `weft ctl`: a running server, over the standard library's HTTP client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from weft.cli.chat_backend import ChatError
from weft.config.options import SettingsError

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 600.0


class RemoteServer:
    """Where a server is, and the key that opens it. Raises SettingsError for a URL that is none."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(
                f"--url is {url!r}; something like http://127.0.0.1:30000 is expected"
            )
        self.address = parts.netloc
        self.path = parts.path.rstrip("/").removesuffix("/v1")  # what all its routes begin with
        self.headers = {"content-type": "application/json"}
        if key:
            self.headers["authorization"] = f"Bearer {key}"
        self._kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        return self._kind(self.address, timeout=timeout_s)

    def missing(self, exc: OSError) -> SettingsError:
        """Nobody listens there."""
        reason = exc.strerror or str(exc)
        return SettingsError(
            f"no server answers at {self.address} ({reason}); weft serve starts one"
        )


class RemoteChatBackend:
    """Answers come from the server at `url`, with the fields `sampling` in each request. Raises SettingsError if there
    is none."""

    def __init__(self, url: str, api_key: str, sampling: Mapping[str, Any]) -> None:
        self._server = RemoteServer(url, api_key)
        self._path = self._server.path + "/v1"
        self._body = {"stream": True, **sampling}
        self.name = self._model()

    def answer(self, messages: list[dict[str, Any]]) -> Generator[str, None, None]:
        """As `ChatBackend.answer`. Closing it closes the connection, and that ends the request in the server."""
        body = json.dumps({**self._body, "model": self.name, "messages": messages})
        with closing(self._server.connect(ANSWER_TIMEOUT_S)) as connection:
            try:
                connection.request(
                    "POST", f"{self._path}/chat/completions", body, self._server.headers
                )
                response = connection.getresponse()
                if response.status != 200:
                    raise ChatError(error_of(response))
                for line in response:
                    if line.startswith(b"data: {"):
                        yield _text(json.loads(line[6:]))
            except (OSError, http.client.HTTPException, ValueError) as exc:
                raise ChatError(f"the connection to {self._server.address} broke: {exc}") from exc

    def _model(self) -> str:
        """The first model that the server has."""
        address = self._server.address
        with closing(self._server.connect(CONNECT_TIMEOUT_S)) as connection:
            try:
                connection.request("GET", f"{self._path}/models", headers=self._server.headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise SettingsError(f"{address} does not let us in: {error_of(response)}")
                return str(json.load(response)["data"][0]["id"])
            except OSError as exc:
                raise self._server.missing(exc) from exc
            except (http.client.HTTPException, ValueError, LookupError, TypeError) as exc:
                raise SettingsError(f"{address} does not speak the OpenAI API") from exc


def _text(event: dict[str, Any]) -> str:
    """The text that one event of the stream brings. Raises ChatError for an error."""
    if "error" in event:
        raise ChatError(str(event["error"].get("message", "the server reports an error")))
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def error_of(response: http.client.HTTPResponse) -> str:
    """What the server says is wrong."""
    content = response.read(100_000)
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {response.status} {response.reason}"
