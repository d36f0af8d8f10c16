"""Sessions: conversations whose tokens the engine keeps, so that a request contains only the new
tokens."""

from __future__ import annotations

import msgspec

from weft.messages.calls import ControlReply, ControlRequest, SuccessReply


class SessionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The point in a session where a request continues. Its prompt is appended to the *history*:
    the prompt and output of an earlier turn, with everything before that turn.

        history of the turn `rid`:   prompt ............... output
        drop_previous_output                             |
        offset > 0                   |<-- offset -->|                    keeps these first tokens
        offset < 0                                  |<-- -offset -->|    drops these last tokens
    """

    id: str  # of the session
    owner: str = ""  # of the session; another owner may use the same id for another session
    rid: str = ""  # the turn that the request continues; empty: the turn that ended last
    offset: int = 0  # where the history is truncated; 0: it is not
    drop_previous_output: bool = False  # omit the output of that turn from the history
    replace: bool = False  # forget the turns after that one; without `rid`: forget all turns
    bos_token_id: int | None = None  # removed from the beginning of a prompt after a history


class OpenSessionReply(SuccessReply):
    wrong: str = ""  # the field of the request that is out of range


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
    """Close a session. If one of its requests runs, the session takes no others, and is closed when
    that one has ended."""

    session_id: str
    owner: str = ""


# ---- sessions that outlive the engine


class KeptTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A turn that has ended."""

    name: str
    parent: str = ""  # the turn that it continues
    start: int = 0  # tokens that it shares with its parent
    prompt_len: int  # with these
    tokens: bytes  # int32, packed: its own tokens after these


class KeptSession(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A session as it is outside of the engine."""

    id: str
    owner: str = ""
    capacity: int
    timeout_s: float
    idle_s: float = 0.0  # since its last request
    num_turns: int = 0  # since it was opened
    last: str = ""  # the turn that ended last
    turns: list[KeptTurn] = []  # parents before their children


class SessionChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What has changed in one session."""

    session: KeptSession  # with the turns that are new, or have changed
    is_new: bool = False  # no earlier turn of a session with this name counts
    is_closed: bool = False
    forgotten: list[str] = []  # turns


class SessionChanges(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="session_changes"
):
    """Sent before the output that ends a turn, and before the reply to a request that opens or
    closes a session."""

    changes: list[SessionChange]


class KeepSessionsReply(ControlReply):
    refused: list[str] = []  # why sessions were not taken


class KeepSessions(ControlRequest[KeepSessionsReply]):
    """Take these sessions, and from now on tell all changes of sessions (`SessionChanges`)."""

    sessions: list[KeptSession] = []
