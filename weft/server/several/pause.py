"""The answer of a request while its model is loaded.

A client of a stream hears comments, which it ignores, so that no proxy between takes the silence
for a lost connection. Then the head of the answer is out, and an error that comes later is an event
of the stream. Other clients hear nothing until the answer.
"""

from __future__ import annotations

from starlette.types import Message, Scope, Send

from weft.residency.rules import Delay
from weft.server.anthropic.reply import ANTHROPIC_EVENTS
from weft.server.errors import ApiError
from weft.server.infill import LLAMA_EVENTS
from weft.server.openai.responses.reply import RESPONSE_EVENTS
from weft.server.stream import OPENAI_EVENTS, SSE, Wire

COMMENT_EVERY_S = 5.0
WIRES = {
    "/v1/messages": ANTHROPIC_EVENTS,
    "/v1/responses": RESPONSE_EVENTS,
    "/openai/v1/responses": RESPONSE_EVENTS,
    "/infill": LLAMA_EVENTS,
}


class PausedAnswer:
    """`send` of a request for a stream that may begin before its model is there."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._wire: Wire = WIRES.get(scope["path"], OPENAI_EVENTS)
        self._scope = scope
        self._send = send
        self._has_begun = False
        self._status = 200  # of the handler's answer

    async def comment(self, model: str, delay: Delay) -> None:
        """Tell the client that its model is being loaded."""
        if not self._has_begun:
            self._has_begun = True
            headers = [(b"content-type", SSE), (b"cache-control", b"no-cache")]
            headers.append((b"x-accel-buffering", b"no"))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        text = f": {model!r} is loading; {delay.position} before it, about {delay.eta_s:.0f} s\n\n"
        body = text.encode("ascii", "replace")
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def fail(self, error: ApiError) -> bool:
        """End the stream with an error. False if nothing was sent yet: the error has a status."""
        if not self._has_begun:
            return False
        body = self._wire.error(error) + self._wire.end
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        return True

    async def __call__(self, message: Message) -> None:
        """What the handler sends: as it is, unless the head of a stream is out already."""
        if not self._has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status == 200:
            await self._send(message)
        elif not message.get("more_body", False):
            reason = self._scope.get("weft.error", "the request failed")
            await self.fail(ApiError(self._status, reason))
