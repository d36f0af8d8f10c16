"""The tokens of prompts: encoded, and cut if they are too long and the request allows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.server.context import ServerContext
from weft.server.requests import Side


class Truncation(NamedTuple):
    """How to cut a prompt that is too long, instead of refusing it."""

    most: int  # tokens to keep; -1: what the context leaves beside the answer
    side: Side  # where tokens are dropped

    def cut(
        self,
        ids: list[int],
        context_len: int,
        max_new_tokens: int | None,
    ) -> list[int]:
        """The part of a prompt that is kept."""
        most = self.most
        if most == -1:
            most = max(context_len - max(max_new_tokens or 1, 1), 1)
        return ids[:most] if self.side == "right" else ids[-most:]


def truncation(
    context: ServerContext,
    most: int | None,
    side: Side | None,
) -> Truncation | None:
    """How to cut prompts, from `truncate_prompt_tokens` and `truncation_side`.

    None: they are not cut. A server with `--auto-truncate` cuts every prompt that is too long.
    """
    if most is None and not context.config.auto_truncate:
        return None
    return Truncation(-1 if most is None else most, side or "left")


async def encode_texts(
    context: ServerContext,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    truncates: bool = False,
) -> list[list[int]]:
    """Ids of each text. Long texts are tokenized off the event loop.

    Raises `ContextExceeded` for a text that is too long, unless it will be truncated.
    """
    context_len = None if truncates else context.info.context_length
    return await context.tokenizer.encode_async(
        texts,
        add_special_tokens=add_special_tokens,
        context_len=context_len,
    )
