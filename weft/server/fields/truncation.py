"""Prompts that are cut instead of refused: by `truncate_prompt_tokens`, or all by `--auto-truncate`."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

Side = Literal["left", "right"]


class Body(Protocol):
    """What is needed of a body. Both fields may be missing."""

    truncate_prompt_tokens: (
        int | None
    )  # so many tokens are kept; -1: as many as leave room for the answer
    truncation_side: Side | None  # where tokens are dropped; left if not given


class Truncation(NamedTuple):
    """How a prompt is cut."""

    most: int  # tokens that are kept; -1: as many as leave room for the answer
    side: Side  # where tokens are dropped

    def __call__(self, ids: list[int], context_len: int, max_new_tokens: int | None) -> list[int]:
        """What is kept of a prompt."""
        most = self.most
        if most == -1:
            most = max(context_len - max(max_new_tokens or 1, 1), 1)
        return ids[:most] if self.side == "right" else ids[-most:]


def truncation(body: Body, *, auto: bool) -> Truncation | None:
    """How the prompts of `body` are to be cut; None if they are not. `auto`: if they are too long, though the body does
    not say so."""
    most = body.truncate_prompt_tokens
    if most is None and not auto:
        return None
    return Truncation(-1 if most is None else most, body.truncation_side or "left")
