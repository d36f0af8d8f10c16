"""The one protocol of all formats: text in, events out."""

from __future__ import annotations

from collections.abc import Callable

from weft.text.parsers.events import Event
from weft.text.parsers.stream import Reading, Stream


class Parser:
    """Reads the text of one completion by one format. Behind the end of the format all is plain text."""

    def __init__(self, read: Callable[[Stream], Reading[None]], stream: Stream) -> None:
        self._stream = stream
        self._work: Reading[None] | None = read(stream)

    @property
    def has_cut(self) -> bool:
        """Whether the last call that was told is not complete."""
        return self._stream.has_cut

    def push(self, text: str) -> list[Event]:
        """What `text` completes; may be nothing."""
        self._stream.add(text)
        return self._go_on()

    def flush(self) -> list[Event]:
        """The rest, at the end of the text."""
        self._stream.end()
        return self._go_on()

    def _go_on(self) -> list[Event]:
        if self._work is not None:
            try:
                next(self._work)
            except StopIteration:
                self._work = None
        if self._work is None:
            self._stream.pass_through()
        return self._stream.events()
