"""Why a picture, a video or a sound is not taken.

MediaError             it cannot be had or read: the message is for the user
  MediaTooLarge        it is beyond a limit of the server
"""

from __future__ import annotations


class MediaError(ValueError):
    """The message says what is wrong and what is allowed; it names no path and no address."""


class MediaTooLarge(MediaError):
    """`limit`: the field of `config.limits.Limits` that is exceeded."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit
