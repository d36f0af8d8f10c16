"""The fields of requests whose prompt is computed by one server and continued by another.

SGLang's `bootstrap_host`, `bootstrap_port` and `bootstrap_room` go to both servers. vLLM's
`kv_transfer_params` go first to the server that computes the prompt; its answer contains those for
the other server. Both become the same `HandoffParams`.

Clients name the server whose KV a decode server takes. Only if the operator has named it, or it
must prove that it knows the secret, is its KV found by other requests.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace
from starlette.requests import Request

from weft.config.handoff import PREFILL
from weft.config.lenders import NamedLender, canonical_host, parse_lenders
from weft.json_types import JsonObject
from weft.messages.handoff import HandoffParams
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.per_prompt import per_prompt

MAX_ROOM = 2**63 - 1
MAX_ROOM_LEN = 128  # characters of a room that is a name
ANY_HOST = ("", "0.0.0.0", "::")
# Key of the scope: the parameters for the other server (`server/http/handoff.py`).
SCOPE = "weft.kv_transfer_params"


class HandoffFields(Protocol):
    """The handoff fields of bodies. A list has one entry per prompt."""

    bootstrap_host: Any
    bootstrap_port: Any
    bootstrap_room: Any
    kv_transfer_params: Any


class _Side(NamedTuple):
    """The role of this server."""

    lends: bool
    host: str  # address at which KV is lent
    port: int
    has_secret: bool
    lenders: tuple[NamedLender, ...]  # that the operator has named; empty: none is named

    @property
    def trusts(self) -> bool:
        """Whether KV that comes from another server is that of the prompt for sure."""
        return self.has_secret or bool(self.lenders)

    def address(self, room: str, host: NamedValue, port: NamedValue) -> HandoffParams:
        """The address from which a decode server takes KV. Raises `ApiError`."""
        found = HandoffParams(room, _checked_host(host), _checked_port(port))
        lenders = self.lenders
        if lenders and not any(one.is_at(found.host, found.port) for one in lenders):
            raise ApiError(
                400,
                f"{host.name} is {host.value!r:.80} and {port.name} {found.port}: no prefill "
                "server that this server takes KV from (--handoff-lenders)",
                param=host.name,
            )
        return found


class NamedValue(NamedTuple):
    """A field of a body, and its value."""

    name: str
    value: Any


def with_handoff(
    context: ServerContext,
    request: Request,
    body: HandoffFields,
    requests: Sequence[GenerateRequest],
) -> list[GenerateRequest]:
    """The requests with their handoff parameters. Raises `ApiError`."""
    side = _side(context)
    param = "kv_transfer_params"
    if body.bootstrap_room is not None:
        param = "bootstrap_room"
    if side is None:
        message = f"{param}: this server was started without --disaggregation-mode"
        raise ApiError(400, message, param=param, code="unsupported_parameter")
    if any(one.session is not None for one in requests):
        message = f"session_params and {param} exclude each other: a session is on one server"
        raise ApiError(400, message, param=param)
    if body.bootstrap_room is not None:
        asked = _of_sglang(body, len(requests), side)
    else:
        asked = _of_vllm(request, body.kv_transfer_params, len(requests), side)
    found: list[GenerateRequest] = []
    for made, address in zip(requests, asked, strict=True):
        one = made
        if address is not None:
            one = replace(one, handoff=address)
            if side.lends:
                one = _without_answer(one)
            elif not side.trusts:
                one = _set_apart(one, address)
        found.append(one)
    return found


def _side(context: ServerContext) -> _Side | None:
    settings = context.info.settings
    mode = settings.get("disaggregation_mode", "none")
    if mode == "none":
        return None
    port = int(settings["disaggregation_bootstrap_port"])
    return _Side(
        lends=mode == PREFILL,
        host=str(settings["handoff_host"]),
        port=port,
        has_secret=bool(settings["handoff_secret"]),
        lenders=parse_lenders(settings["handoff_lenders"], port),
    )


def _set_apart(request: GenerateRequest, address: HandoffParams) -> GenerateRequest:
    """The same request, in a part of the cache that only requests with this address use: whoever
    listens there may send anything as KV."""
    return replace(
        request,
        cache_salt=f"\0lent by {address.host}:{address.port}\0{request.cache_salt}",
        handoff=replace(address, lent_salt=request.cache_salt),
    )


def _without_answer(request: GenerateRequest) -> GenerateRequest:
    """The same request, without generated tokens: the server that continues it samples the first
    token, too."""
    nothing = SamplingParams(max_new_tokens=0, temperature=0.0)
    return replace(request, sampling=nothing, prediction=b"")


# SGLang


def _of_sglang(body: HandoffFields, count: int, side: _Side) -> list[HandoffParams | None]:
    hosts = per_prompt("bootstrap_host", body.bootstrap_host, count)
    ports = per_prompt("bootstrap_port", body.bootstrap_port, count)
    rooms = per_prompt("bootstrap_room", body.bootstrap_room, count)
    found: list[HandoffParams | None] = []
    for index in range(count):
        room = _checked_room("bootstrap_room", rooms[index])
        if count > 1 and not isinstance(body.bootstrap_room, list):
            room = f"{room}/{index}"
        port = ports[index]
        if port is None:
            port = side.port
        if side.lends:
            found.append(HandoffParams(room))
            continue
        host = NamedValue("bootstrap_host", hosts[index])
        found.append(side.address(room, host, NamedValue("bootstrap_port", port)))
    return found


# vLLM


def _of_vllm(request: Request, params: Any, count: int, side: _Side) -> list[HandoffParams | None]:
    name = "kv_transfer_params"
    if not isinstance(params, dict):
        raise ApiError(400, f"{name} must be an object", param=name)
    wanted = "do_remote_prefill"
    other = "do_remote_decode"
    if side.lends:
        wanted, other = other, wanted
    if params.get(other):
        mode = "decode"
        if side.lends:
            mode = "prefill"
        message = f"{name}.{other} is set, but this server has --disaggregation-mode {mode}"
        raise ApiError(400, message, param=name)
    if not params.get(wanted):
        return [None] * count
    if side.lends:
        room = uuid.uuid4().hex
        host = side.host
        if host in ANY_HOST:
            host = request.url.hostname or "127.0.0.1"
        request.scope[SCOPE] = _as_json(room, host, side.port)
        address = HandoffParams(room)
    else:
        room = _checked_room(f"{name}.remote_request_id", params.get("remote_request_id"))
        remote_host = NamedValue(f"{name}.remote_host", params.get("remote_host"))
        remote_port = NamedValue(f"{name}.remote_port", params.get("remote_port"))
        address = side.address(room, remote_host, remote_port)
    if count == 1:
        return [address]
    return [HandoffParams(f"{room}/{index}", address.host, address.port) for index in range(count)]


def _as_json(room: str, host: str, port: int) -> JsonObject:
    """The parameters for the other server, under vLLM's names. The room identifies the pages."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"{host}:{port}",
        "remote_request_id": room,
        "remote_block_ids": [],
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
    }


# Both


def _checked_room(name: str, value: Any) -> str:
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_ROOM_LEN:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ROOM:
        return str(value)
    message = (
        f"{name} is {value!r:.40}; 0 to {MAX_ROOM} are allowed, or a name of up to "
        f"{MAX_ROOM_LEN} printable characters"
    )
    raise ApiError(400, message, param=name)


def _checked_host(field: NamedValue) -> str:
    name, value = field
    host = canonical_host(value) if isinstance(value, str) else ""
    if host:
        return host
    message = (
        f"{name} is {value!r:.40}; the host of the prefill server is needed, a name or an address"
    )
    raise ApiError(400, message, param=name)


def _checked_port(field: NamedValue) -> int:
    name, value = field
    number = value
    if isinstance(value, str) and value.isdecimal():  # as vLLM's proxies send it
        number = int(value[:6])
    if isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= 65_535:
        return number
    message = f"{name} is {value!r:.40}; 1 to 65,535 are allowed"
    raise ApiError(400, message, param=name)
