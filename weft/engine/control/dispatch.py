"""From the type of a message to its handler in one look-up.

A table of types and handlers also serves types that inherit from one in it: the nearest ancestor's handler is found
once and remembered. It knows nothing of what handlers do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

H = TypeVar("H")


class IncompleteTable(LookupError):
    """There are messages that nobody handles; the error names them."""


class TypeBasedDispatcher(Generic[H]):
    """Finds handlers in `handlers`, which may still be added to before the first look-up of a type."""

    def __init__(self, handlers: Mapping[type, H]) -> None:
        self._handlers = handlers
        self._found: dict[type, H | None] = {}

    def find(self, kind: type) -> H | None:
        """The handler of messages of this type; None if there is none."""
        try:
            return self._found[kind]
        except KeyError:
            found = next(
                (self._handlers[base] for base in kind.__mro__ if base in self._handlers), None
            )
            self._found[kind] = found
            return found

    def require(self, kinds: Iterable[type]) -> None:
        """Raise `IncompleteTable` unless each of these types has a handler."""
        missing = sorted(kind.__name__ for kind in kinds if self.find(kind) is None)
        if missing:
            raise IncompleteTable(f"messages without a handler: {', '.join(missing)}")
