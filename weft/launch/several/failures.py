"""Loads that have failed: the answers for their requests, and when a load is tried again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from weft.batches.tries import NOT_LOADED
from weft.launch.several.hosted import LoadFailed
from weft.observe.log import EventLog
from weft.server.errors import ApiError

MOST_TRIES = 2  # loads in a row, if the engine's process ends without a reason
RETRY_S = 5.0  # time in which the reason of a failed load answers the requests that come

log = EventLog("models")


class LoadFailures:
    """By the name of the model."""

    def __init__(self, count: Callable[[str], object]) -> None:
        """`count` counts a failure of the model with this name."""
        self._count = count
        self._last: dict[str, tuple[float, ApiError]] = {}
        self._tries: Counter[str] = Counter()  # loads in a row whose engines have ended

    def reason(self, name: str) -> str:
        """Why the last load of a model failed; "" if it did not."""
        found = self._last.get(name)
        return "" if found is None else found[1].message

    def forget(self, name: str) -> None:
        """The model is loaded, or somebody asks for another try."""
        self._last.pop(name, None)
        self._tries[name] = 0

    def may_try_again(self, name: str, exc: LoadFailed) -> bool:
        """Whether a load that has failed is tried again while its requests wait."""
        self._tries[name] += 1
        if exc.is_users or self._tries[name] >= MOST_TRIES:
            self._tries[name] = 0
            return False
        log.warning("load_tried_again", model=name, reason=exc)
        return True

    def note(self, name: str, exc: LoadFailed) -> ApiError:
        """Returns the answer for the requests that wait for the model."""
        self._count(name)
        log.error("load_failed", model=name, reason=exc)
        message = f"the model {name!r} cannot be loaded: {exc}"
        error = ApiError(500 if exc.is_users else 503, message, code=NOT_LOADED)
        if exc.is_users:  # else the next request tries again
            self._last[name] = (time.monotonic(), error)
        return error

    def require_none(self, name: str) -> bool:
        """Raise the reason of a load that has just failed, instead of trying again at once. Returns
        whether an older one has failed."""
        found = self._last.get(name)
        if found is None:
            return False
        at_s, error = found
        if time.monotonic() < at_s + RETRY_S:
            raise ApiError(error.status, error.message, code=error.code)
        return True
