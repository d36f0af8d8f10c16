"""The other end of `weft chat --url`: any server with the OpenAI API, over the standard library's HTTP client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from weft.config.options import SettingsError
from weft.launch.generate import SamplingOptions
from weft.launch.talker import ChatError

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 600.0


class RemoteTalker:
    """Answers come from the server at `url`. Raises SettingsError if there is none."""

    def __init__(self, url: str, api_key: str, sampling: SamplingOptions) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"--url is {url!r}; something like http://127.0.0.1:30000 is expected")
        self._scheme, self._address = parts.scheme, parts.netloc
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._body = {
            "stream": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **({"max_tokens": sampling.max_tokens} if sampling.max_tokens else {}),
            **({"top_k": sampling.top_k} if sampling.top_k else {}),
            **({"min_p": sampling.min_p} if sampling.min_p else {}),
            **({"repetition_penalty": sampling.repetition_penalty} if sampling.repetition_penalty != 1 else {}),
        }
        self.name = self._model()

    def answer(self, messages: list[dict[str, Any]]) -> Generator[str, None, None]:
        """As `Talker.answer`. Closing it closes the connection, and that ends the request in the server."""
        body = json.dumps({**self._body, "model": self.name, "messages": messages})
        with closing(self._connection(ANSWER_TIMEOUT_S)) as connection:
            try:
                connection.request("POST", f"{self._path}/chat/completions", body, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise ChatError(_reason(response))
                for line in response:
                    if line.startswith(b"data: {"):
                        yield _text(json.loads(line[6:]))
            except (OSError, http.client.HTTPException, ValueError) as exc:
                raise ChatError(f"the connection to {self._address} broke: {exc}") from exc

    def _model(self) -> str:
        """The first model that the server has."""
        with closing(self._connection(CONNECT_TIMEOUT_S)) as connection:
            try:
                connection.request("GET", f"{self._path}/models", headers=self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise SettingsError(f"{self._address} does not let us in: {_reason(response)}")
                return str(json.load(response)["data"][0]["id"])
            except OSError as exc:
                reason = exc.strerror or str(exc)
                raise SettingsError(f"no server answers at {self._address} ({reason}); weft serve starts one") from exc
            except (http.client.HTTPException, ValueError, LookupError, TypeError) as exc:
                raise SettingsError(f"{self._address} does not speak the OpenAI API") from exc

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._scheme == "https" else http.client.HTTPConnection
        return kind(self._address, timeout=timeout_s)


def _text(event: dict[str, Any]) -> str:
    """The text that one event of the stream brings. Raises ChatError for an error."""
    if "error" in event:
        raise ChatError(str(event["error"].get("message", "the server reports an error")))
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def _reason(response: http.client.HTTPResponse) -> str:
    """What the server says is wrong."""
    content = response.read(100_000)
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {response.status} {response.reason}"
