"""Errors as HTTP answers: `{"error": {"message", "type", "param", "code"}}`, as OpenAI clients
expect. Routes of other APIs answer in the form that their clients expect. The member `request_id`
beside `error` is the name of the request in the log.

    ApiError            an answer with a status; raised anywhere in a handler
    ClientGone          the client left while its request was read; no answer is sent

Exceptions of other layers are translated only here. No message contains a path, an address or a
traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.batches.files import BatchRefused, FileNotStored
from weft.client.calls import EngineFault
from weft.client.engine_state import EngineUnavailable
from weft.messages.sampling import InvalidParam
from weft.observe import request_context
from weft.observe.log import EventLog
from weft.state.store import StateError
from weft.text.tokenizer import ContextExceeded
from weft.text.turns import Busy

log = EventLog("server")
MAX_ERROR_LEN = 1_000  # characters of a message
# Clients search for these words, to shorten a conversation.
TOO_LONG = "this model's maximum context length"

# The sizes in the messages of ContextExceeded.
_SIZES = {
    "prompt": re.compile(r"the prompt has ([0-9,]+) tokens?\b"),
    "wanted": re.compile(r"max_tokens is ([0-9,]+)"),
    "context": re.compile(r"(?:context of|at most) ([0-9,]+)"),
}

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = _TYPES | {
    503: "overloaded_error",
    504: "timeout_error",
    408: "timeout_error",
}
FOR_NOW = (429, 503)  # statuses with which a client may come back
_RETRY = {"retry-after": "1"}


# In the head of an answer with 503: nothing was done for the request, and another server may do it.
NOT_BEGUN = "x-weft-not-begun"


class ApiError(Exception):
    """Answer with `status` and this message.

    `param` names the field of the request that caused the error, `limit` the field of
    `config.limits.Limits` that the request exceeds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        limit: str = "",
    ) -> None:
        super().__init__(message)
        if status in FOR_NOW:
            headers = {**_RETRY, **(headers or {})}
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers
        self.limit = limit


class ClientGone(Exception):
    """The client disconnected before its request was complete, or while it was prepared."""

    def __init__(self, when: str = "while its request was prepared") -> None:
        super().__init__(f"the client left {when}")


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail
    request_id: str = ""


def not_supported(param: str, where: str = "yet") -> ApiError:
    """For a field that other engines or APIs support and this one does not: it is never ignored
    silently."""
    return ApiError(
        400,
        f"{param} is not supported {where}",
        param=param,
        code="unsupported_parameter",
    )


def over(
    limit: str,
    message: str,
    *,
    param: str | None = None,
    status: int = 400,
) -> ApiError:
    """A refusal that is counted under the name of its limit, a field of `config.limits.Limits`."""
    return ApiError(status, message, param=param, limit=limit)


def failed(status: int, message: str, retry_after_s: int = 0) -> ApiError:
    """For a completion that the engine ended with an error. `retry_after_s`: seconds after which
    the client may retry; 0: unknown."""
    headers = None
    if status in FOR_NOW and retry_after_s:
        headers = {"retry-after": str(retry_after_s)}
    return ApiError(status, message or "the engine failed", headers=headers)


def translated(exc: BaseException) -> ApiError:
    """`exc` as the answer that the client gets."""
    match exc:
        case ApiError():
            return exc
        case ContextExceeded():
            return ApiError(
                400,
                _too_long(str(exc)),
                param=exc.param,
                code="context_length_exceeded",
            )
        case InvalidParam():
            return ApiError(400, str(exc), param=exc.param)
        case BatchRefused():
            return ApiError(400, str(exc), param=exc.param, limit=exc.limit)
        case FileNotStored():
            return ApiError(503, str(exc))
        case Busy() | EngineUnavailable():
            return ApiError(503, str(exc))
        case StateError():  # logged where it was raised; the client need not know the folder
            message = "the answer could not be stored, because the server's disk takes nothing"
            return ApiError(503, message)
        case EngineFault():  # logged where it was raised
            return ApiError(500, str(exc))
        case HTTPException(status_code=404):
            return ApiError(404, "there is no route with this path; GET /docs lists the routes")
        case HTTPException(status_code=405, headers={"Allow": methods}):
            allowed = ", ".join(sorted(methods.split(", ")))
            message = f"this path does not take this method; allowed methods: {allowed}"
            return ApiError(405, message, headers=exc.headers)
        case HTTPException():
            return ApiError(exc.status_code, f"{exc.detail}", headers=exc.headers)
    log.exception("request_failed", exc, type=type(exc).__name__)
    return ApiError(500, "internal server error")


def _too_long(message: str) -> str:
    """The message of ContextExceeded after OpenAI's words, whose number has no commas."""
    found = _SIZES["context"].search(message)
    if found is None:
        return f"{TOO_LONG} is exceeded: {message}"
    return f"{TOO_LONG} is {found[1].replace(',', '')} tokens: {message}"


def error_json(error: ApiError) -> bytes:
    """The body of an error answer, or the data of an error event."""
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    detail = ErrorDetail(
        message=_message(error),
        type=_TYPES.get(error.status, fallback),
        param=error.param,
        code=error.code or error.status,
    )
    return msgspec.json.encode(ErrorBody(detail, request_context.rid()))


def anthropic_error(error: ApiError) -> bytes:
    """Like `error_json`, for clients of Anthropic's API. Its errors name no field, so the message
    does."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, fallback)
    message = _message(error)
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    if error.code == "context_length_exceeded":
        message = f"{_anthropic_excess(error.message)}: {message}"
    detail = {"type": kind, "message": message}
    fields = {
        "type": "error",
        "error": detail,
        "request_id": request_context.rid(),
    }
    return msgspec.json.encode(fields)


def _anthropic_excess(message: str) -> str:
    """Anthropic's words for a prompt that is too long, and its numbers.

    Claude Code reads both: it asks again for fewer tokens, or compacts the conversation by as much
    as is too long.
    """
    found = {
        key: match[1].replace(",", "")
        for key, one in _SIZES.items()
        if (match := one.search(message))
    }
    if {"prompt", "wanted", "context"} <= found.keys():
        sizes = f"{found['prompt']} + {found['wanted']} > {found['context']}"
        return f"input length and `max_tokens` exceed context limit: {sizes}"
    if {"prompt", "context"} <= found.keys():
        return f"prompt is too long: {found['prompt']} tokens > {found['context']} maximum"
    return "prompt is too long"


def ollama_error(error: ApiError) -> bytes:
    return msgspec.json.encode({"error": _message(error)})


def _message(error: ApiError) -> str:
    if len(error.message) <= MAX_ERROR_LEN:
        return error.message
    return error.message[:MAX_ERROR_LEN] + "..."


def _form(path: str) -> Callable[[ApiError], bytes]:
    """The function that writes errors in the form of the API of `path`."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return anthropic_error
    if path.startswith("/api/"):
        return ollama_error
    return error_json


def error_event(path: str, error: ApiError) -> bytes:
    """What ends a stream of server-sent events, in the form of the API of `path`."""
    form = _form(path)
    name = b""
    if form is anthropic_error:
        name = b"event: error\n"  # its clients overlook an event without a name
    return name + b"data: " + form(error) + b"\n\n"


def error_response(exc: BaseException) -> Response:
    # A traceback refers to the frame, which refers to the answer and all data of the request: they
    # would stay in memory until the next garbage collection.
    return ErrorAnswer(translated(exc).with_traceback(None))


class ErrorAnswer(Response):
    """An error as an answer. It also reports its message, its code and the exceeded limit to
    the middleware."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(
            error_json(error),
            error.status,
            error.headers,
            media_type="application/json",
        )
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error
        scope["weft.limit"] = error.limit
        scope["weft.error"] = error.message
        scope["weft.code"] = error.code
        body = _form(scope["path"])(error)
        await Response(body, error.status, error.headers, media_type="application/json")(
            scope, receive, send
        )
