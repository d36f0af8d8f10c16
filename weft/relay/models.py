"""Which servers of a pool have the model that a request names.

Servers list their models to clients with a key, and the front has no key: it asks with the headers
of the request that needs the answer, and keeps the names until the server goes out.

    all servers have the same model   any server; for a name that it has not, the server refuses
    they have different ones          one of those that have the name; none: 404 with all names
    one that is out has not listed    a name that no other has may be its: 503, and no 404
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from weft.json_types import JsonObject
from weft.observe.log import EventLog
from weft.relay.connection import Headers, ServerGone, ServerLines
from weft.server.errors import ApiError

ASK_TIMEOUT_S = 5.0
MAX_LIST_BYTES = 4 << 20
MODELS = b"/v1/models"
ONE_MODEL = "/v1/models/"
# Paths that list models -> the field of the answer with the list, and that of an item's name.
LISTS = {
    "/v1/models": ("data", "id"),
    "/models": ("data", "id"),
    "/api/tags": ("models", "name"),
    "/api/ps": ("models", "name"),
}
REFUSED = (401, 403)
ANY_MODEL = ("", "default")  # names by which a server takes its own model
# Headers of a client's body, which a question without a body has not.
BODY_HEADERS = (b"content-type", b"content-encoding", b"content-length")

log = EventLog("route")


class ModelNames:
    """The names that each server of a pool has, as far as they are known."""

    def __init__(self) -> None:
        # rank -> names, the server's own model first; empty: the server lists none, and may have
        # any. A server that has not sent them is not here.
        self._names: dict[int, tuple[str, ...]] = {}
        self._has_warned = False

    def forget(self, rank: int) -> None:
        """The server may have been restarted with another model."""
        self._names.pop(rank, None)

    def knows(self, rank: int) -> bool:
        return rank in self._names

    def learn(self, rank: int, names: Sequence[str]) -> None:
        if not names and self._names.get(rank):
            return  # it did not answer this time
        self._names[rank] = tuple(names)
        bases = sorted(self._bases())
        if len(bases) > 1 and not self._has_warned:
            self._has_warned = True
            log.warning("models_differ", models=", ".join(bases))

    def ranks(self, model: str, among: Sequence[int]) -> list[int]:
        """Those of the servers `among` that may have `model`; without a name, all of them if they
        have one model, else none."""
        if model not in ANY_MODEL:
            having = self._having(model)
            if having:
                return [rank for rank in among if rank in having]
            silent = [rank for rank in among if not self._names.get(rank)]
            if silent:
                return silent
        if len(self._bases()) > 1:
            return []
        return list(among)

    def unseen(self, model: str, out: Sequence[int]) -> ApiError | None:
        """The error for a model that no known server has, if one of the servers `out` may have it:
        it has never listed its models."""
        num_unseen = sum(not self.knows(rank) for rank in out)
        if not num_unseen or model in ANY_MODEL or self._having(model):
            return None
        message = (
            f"no ready server has the model {model[:128]!r}; "
            f"servers that have not listed theirs yet: {num_unseen}"
        )
        return ApiError(503, message, headers={"retry-after": "1"})

    def none(self, model: str) -> ApiError:
        """The error for a model that no server has, or for a request that names none."""
        listed = ", ".join(repr(name) for name in self._all())
        if model in ANY_MODEL:
            message = f"the servers behind this front have different models; name one of {listed}"
            return ApiError(400, message, param="model")
        if self._having(model):
            message = f"no server with the model {model[:128]!r} is ready"
            return ApiError(503, message, headers={"retry-after": "1"})
        message = f"the model {model[:128]!r} does not exist; the servers have {listed}"
        return ApiError(404, message, param="model", code="model_not_found")

    def _all(self) -> list[str]:
        listed = [self._names[rank] for rank in sorted(self._names)]
        return list(dict.fromkeys(name for names in listed for name in names))

    def _having(self, model: str) -> set[int]:
        return {rank for rank, names in self._names.items() if model in names}

    def _bases(self) -> set[str]:
        """The servers' own models, without adapters."""
        return {names[0] for names in self._names.values() if names}


async def ask_names(lines: ServerLines, headers: Headers) -> tuple[str, ...] | None:
    """The names that a server lists to the client with these headers; empty if it lists none or
    does not answer, None if it refuses this client."""
    status, found = await ask_list(lines, MODELS, headers)
    if status in REFUSED:
        return None
    field, id = LISTS[MODELS.decode()]
    cards = found.get(field)
    if status != 200 or not isinstance(cards, list):
        return ()
    named = [card for card in cards if isinstance(card, dict) and id in card]
    names = [str(card[id]) for card in named]
    for card in named:  # after all names: the first one is that of the server's own model
        aliases = card.get("aliases")
        if isinstance(aliases, list):
            names += map(str, aliases)
    return tuple(dict.fromkeys(names))


async def ask_list(lines: ServerLines, target: bytes, headers: Headers) -> tuple[int, JsonObject]:
    """The status and the JSON object with which a server answers; status 0 if it does not answer,
    {} if it is no object."""
    asked = [(name, value) for name, value in headers if name not in BODY_HEADERS]
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            answer = await lines.ask("GET", target, asked, b"")
            try:
                content = await answer.read_all(MAX_LIST_BYTES)
            finally:
                answer.close()
    except (TimeoutError, ServerGone, EOFError):
        return 0, {}
    try:
        return answer.status, msgspec.json.decode(content, type=dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return answer.status, {}


def merged(path: str, answers: Sequence[JsonObject]) -> JsonObject:
    """The answers of several servers to a path of `LISTS` as one; a name comes once."""
    field, id = LISTS[path]
    cards: dict[str, JsonObject] = {}
    for answer in answers:
        for card in answer.get(field) or []:
            cards.setdefault(str(card.get(id)), card)
    merged = {**answers[0], field: list(cards.values())}
    if "first_id" in merged and cards:
        names = list(cards)
        merged |= {"first_id": names[0], "last_id": names[-1]}
    return merged
