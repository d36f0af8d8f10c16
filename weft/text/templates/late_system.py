"""System messages after the beginning, for a template that has none there.

Coding agents send them after the user's: templates refuse them, leave them out, or move them to
the front, where each new one would change the prompt from its beginning. Here they keep their
place, as text of the user between tags:

    user        Fix the test.
                <system>
                The file has changed.
                </system>

Behind the result of a tool they become a part of it: a new turn of the user would make templates
drop the reasoning about the task that still goes on. Knows no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.text.templates.turns import (
    RESULT_ROLES,
    SYSTEM_ROLES,
    Message,
    Turn,
    joined_turns,
    put_together,
)

BEGIN, END = "<system>", "</system>"


class SystemAsText(NamedTuple):
    messages: list[Message]
    indices: list[int]  # positions of the system messages that became text of another message


def is_late(messages: Sequence[Message]) -> bool:
    """Whether a system message comes after another message."""
    return any(message.get("role") in SYSTEM_ROLES for message in messages[1:])


def with_system_as_text(messages: Sequence[Message], *, in_results: bool = True) -> SystemAsText:
    """The conversation with one system message at most, at the beginning.

    Those that follow the first one directly join it; later ones become text of the user or, with
    `in_results`, of the result before them.
    """
    turns: list[Turn] = []
    indices: list[int] = []
    in_front = True
    for index, message in enumerate(messages):
        if message.get("role") not in SYSTEM_ROLES:
            in_front = False
            turns.append(Turn(message, merges=False))
        elif in_front:
            role = turns[0].message["role"] if turns else message["role"]
            turns.append(Turn({**message, "role": role}, merges=True))
        else:
            content = put_together(f"{BEGIN}\n", message.get("content") or "", f"\n{END}")
            indices.append(index)
            before = turns[-1].message
            if in_results and before.get("role") in RESULT_ROLES:
                joined = put_together(before.get("content") or "", "\n", content)
                turns[-1] = Turn({**before, "content": joined}, merges=False)
            else:
                turns.append(Turn({"role": "user", "content": content}, merges=True))
    return SystemAsText(joined_turns(turns), indices)
