"""Sessions: conversations whose tokens the engine remembers, so that a request only brings what is
new."""

from __future__ import annotations

import msgspec

from weft.messages.calls import ControlRequest, SuccessReply


class SessionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where in a session a request goes on: its prompt is put after the *history*, which is prompt
    and output of an earlier turn, with what came before that.

        history of the turn `rid`:   prompt ............... output
        drop_previous_output                             |
        offset > 0                   |<-- offset -->|                    its first tokens
        offset < 0                                  |<-- -offset -->|    all but its last tokens
    """

    id: str  # of the session
    owner: str = ""  # of the session: others have none of that id
    rid: str = ""  # the turn that it continues; the one that ended last if empty
    offset: int = 0  # where the history is cut; 0: nowhere
    drop_previous_output: bool = False  # the output of that turn is no history
    replace: bool = False  # forget the turns behind that one; without `rid`: forget everything
    bos_token_id: int | None = None  # a prompt that begins with it loses it behind a history


class OpenSessionReply(SuccessReply):
    pass


class OpenSession(ControlRequest[OpenSessionReply]):
    """Begin a session without history."""

    session_id: str
    owner: str = ""  # ids are told apart by it
    capacity: int = 0  # tokens of all its turns together; 0: as many as the settings allow
    timeout_s: float = 0.0  # without a request until it is closed; 0: as the settings say


class CloseSessionReply(SuccessReply):
    pass


class CloseSession(ControlRequest[CloseSessionReply]):
    """Forget a session. While a request of it runs, it takes no other, and is closed afterwards."""

    session_id: str
    owner: str = ""
