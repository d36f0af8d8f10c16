"""Sessions: conversations whose tokens the engine remembers, so that a request only brings what is new."""

from __future__ import annotations

import msgspec


class SessionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where in a session a request goes on: its prompt is put after the *history*, which is prompt and output of an
    earlier turn, with what came before that.

        history of the turn `rid`:   prompt ............... output
        drop_previous_output                             |
        offset > 0                   |<-- offset -->|                    the first so many tokens
        offset < 0                                  |<-- -offset -->|    all but so many at the end
    """

    id: str  # of the session
    owner: str = ""  # whose session it is: others have none of that id
    rid: str = ""  # the turn that it continues; the one that ended last if empty
    offset: int = 0  # where the history is cut; 0: nowhere
    drop_previous_output: bool = False  # the output of that turn is no history
    replace: bool = (
        False  # forget what followed that turn; without `rid`: forget everything, begin anew
    )
    bos_token_id: int | None = None  # a prompt that begins with it loses it behind a history


class OpenSession(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="open_session"
):
    """Begin a session without history."""

    call: int
    session_id: str
    owner: str = ""  # to whom it belongs; ids are told apart by it
    capacity: int = (
        0  # tokens that all its turns may have together; 0: as many as the settings allow
    )
    timeout_s: float = 0.0  # after so long without a request it is closed; 0: as the settings say


class OpenSessionReply(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="open_session_reply"
):
    call: int
    session_id: str
    success: bool
    message: str = ""


class CloseSession(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="close_session"
):
    """Forget a session. While a request of it runs, it takes no other, and is closed when that has ended."""

    call: int
    session_id: str
    owner: str = ""


class CloseSessionReply(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="close_session_reply"
):
    call: int
    session_id: str
    success: bool
    message: str = ""
