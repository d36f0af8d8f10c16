"""Sessions: conversations whose tokens the engine remembers, so that a request only brings what is
new."""

from __future__ import annotations

import msgspec

from weft.messages.calls import ControlRequest, SuccessReply


class SessionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where in a session a request continues: its prompt is put after the *history*, which is
    prompt and output of an earlier turn, with everything before that turn.

        history of the turn `rid`:   prompt ............... output
        drop_previous_output                             |
        offset > 0                   |<-- offset -->|                    its first tokens
        offset < 0                                  |<-- -offset -->|    all but its last tokens
    """

    id: str  # of the session
    owner: str = ""  # of the session; another owner may use the same id for another session
    rid: str = ""  # the turn that the request continues; empty: the turn that ended last
    offset: int = 0  # where the history is cut; 0: not at all
    drop_previous_output: bool = False  # leave the output of that turn out of the history
    replace: bool = False  # forget the turns after that one; without `rid`: forget all turns
    bos_token_id: int | None = None  # a prompt that begins with it loses it after a history


class OpenSessionReply(SuccessReply):
    pass


class OpenSession(ControlRequest[OpenSessionReply]):
    """Begin a session without history."""

    session_id: str
    owner: str = ""  # sessions of different owners may have the same id
    capacity: int = 0  # tokens of all its turns together; 0: as many as the settings allow
    # without a request until the session is closed; 0: the default of the settings
    timeout_s: float = 0.0


class CloseSessionReply(SuccessReply):
    pass


class CloseSession(ControlRequest[CloseSessionReply]):
    """Forget a session. While one of its requests runs, it takes no other; then it is closed."""

    session_id: str
    owner: str = ""
