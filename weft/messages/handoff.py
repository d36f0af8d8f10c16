"""The fields of a request for a handoff: one server computes its prompt, another continues it."""

from __future__ import annotations

import msgspec


class HandoffParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The address of the KV for a handoff.

    The prefill server keeps the prompt's KV under the name of the room; the decode server fetches
    it from `host` and `port`.
    """

    room: str
    host: str = ""
    port: int = 0
    # Salt of the prompt on the prefill server, if KV of that server has a namespace of its own
    # here; None: the salt of the request.
    lent_salt: str | None = None
