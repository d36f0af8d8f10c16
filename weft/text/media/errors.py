"""Errors about a picture, a video or a sound of a request.

MediaError             it cannot be fetched or read; the message is for the user
  MediaTooLarge        it exceeds a limit of the server
"""

from __future__ import annotations


class MediaError(ValueError):
    """The message says what is wrong and what is allowed, without paths and addresses."""


class MediaTooLarge(MediaError):
    """`limit`: the field of `config.limits.Limits` that is exceeded. The message names its option,
    if `message` does not do so."""

    def __init__(self, limit: str, message: str) -> None:
        option = "--" + limit.replace("_", "-")
        if option not in message:
            message = f"{message} ({option})"
        super().__init__(message)
        self.limit = limit
