"""Adds `kv_transfer_params` to the answers of a server that computes prompts for other servers: the
location of the prompt's KV, as vLLM's clients expect it.

Only such a server has this wrapper, and it acts only on requests that ask for it.
"""

from __future__ import annotations

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.server.fields.handoff import SCOPE


class WithTransferParams:
    """Adds one member to an answer that is a JSON object. Streams stay unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None

        async def pass_on(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and SCOPE in scope:
                start = message
                return
            if start is not None:
                head = start
                start = None
                if not message.get("more_body"):
                    head, message = _joined(head, message, scope)
                await send(head)
            await send(message)

        await self._app(scope, receive, pass_on)


def _joined(head: Message, message: Message, scope: Scope) -> tuple[Message, Message]:
    """The head and the whole body of an answer, with the new member."""
    body = message.get("body", b"")
    if head["status"] != 200 or not body.startswith(b"{") or not body.endswith(b"}"):
        return head, message
    member = b'"kv_transfer_params":' + msgspec.json.encode(scope[SCOPE])
    longer = body[:-1] + b"," + member + b"}"
    headers = []
    for name, value in head["headers"]:
        if name.lower() == b"content-length":
            headers.append((name, str(len(longer)).encode()))
        else:
            headers.append((name, value))
    return {**head, "headers": headers}, {**message, "body": longer}
