"""Errors about a picture, a video or a sound of a request.

MediaError             it cannot be fetched or read; the message is for the user
  MediaTooLarge        it exceeds a limit of the server
"""

from __future__ import annotations


class MediaError(ValueError):
    """The message says what is wrong and what is allowed, without paths and addresses."""


class MediaTooLarge(MediaError):
    """`limit`: the field of `config.limits.Limits` that is exceeded."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit
