"""The field `input_embeds`: one prompt or a batch, as nested lists of numbers or base64 of float32.

`client/prompt.py` checks the vectors, also for `weft.LLM`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import msgspec

from weft.client.prompt import PARAM, pack_input_embeds, placeholder_ids
from weft.config.numbers import shown
from weft.messages.sampling import InvalidParam
from weft.messages.status import EngineReady
from weft.messages.wrong_field import wrong_field
from weft.server.context import ServerContext

INLINE_LEN = 16_384  # bytes up to which the field is read on the event loop
ABSENT = msgspec.Raw(b"null")
_BRACKETS = re.compile(rb"[\s\[]*")
_FORMS: dict[int, Any] = {
    0: str,
    1: list[str],
    2: list[list[float]],
    3: list[list[list[float]]],
}  # by number of opening brackets


class Embeds(NamedTuple):
    """The prompts of a request. `ids` are placeholders, one per vector."""

    ids: list[list[int]]
    vectors: list[bytes]
    is_batch: bool


async def embeds_of(context: ServerContext, raw: msgspec.Raw) -> Embeds | None:
    """`read_embeds`, in a thread if the field is large."""
    work = partial(read_embeds, raw, context.client.engine)
    if memoryview(raw).nbytes <= INLINE_LEN:
        return work()
    return await context.readers.run(work, is_long=True)


def read_embeds(raw: msgspec.Raw, engine: EngineReady) -> Embeds | None:
    """None if the field is not given. Raises `InvalidParam`."""
    text = bytes(raw)
    if text.strip() == b"null":
        return None
    # The decoder needs one type, and does not support a union of lists of different depth: count
    # brackets first.
    depth = 0
    match = _BRACKETS.match(text)
    if match is not None:
        depth = match[0].count(b"[")
    if depth not in _FORMS:
        message = f"{PARAM} is nested {depth} deep; [tokens][size] or a list of those is needed"
        raise InvalidParam(PARAM, message)
    try:
        value = msgspec.json.decode(text, type=_FORMS[depth])
    except msgspec.ValidationError as exc:
        if not depth:
            message = (
                f"{PARAM} is {_named(text)}; base64, [tokens][size] or a list of these is needed"
            )
            raise InvalidParam(PARAM, message) from exc
        raise InvalidParam(PARAM, wrong_field(exc, text, within=PARAM).text) from exc
    is_batch = depth in (1, 3)
    prompts = value
    if not is_batch:
        prompts = [value]
    if not prompts:
        raise InvalidParam(PARAM, f"{PARAM} is empty; there is no prompt")
    vectors = [pack_input_embeds(prompt, engine) for prompt in prompts]
    ids = [placeholder_ids(own, engine) for own in vectors]
    return Embeds(ids, vectors, is_batch)


def _named(text: bytes) -> str:
    """The value of a JSON text, as errors show it."""
    try:
        return shown(msgspec.json.decode(text))
    except RecursionError:
        return "nested too deeply"
