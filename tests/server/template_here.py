"""A chat template that is rendered in this process, for servers whose tests are not about that:
each process that renders takes a tenth of a second of a processor to start.

`tests/text/test_renderer.py` has the processes, and `tests/e2e` servers with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from weft.text.templates import render_process, renderer


class TemplateHere:
    """As `config.helper.Helper` with `render_process`, without a process and its limits."""

    def __init__(
        self,
        module: str,
        setup: bytes,
        check_setup: Callable[[bytes], object],
        files: Sequence[int] = (),
    ) -> None:
        assert module == render_process.__name__
        assert not files
        self._worker = render_process.TemplateWorker(_no_limit, _no_limit)
        self._setup = setup
        self._check_setup = check_setup
        self._is_set_up = False

    def start(self) -> None:
        pass

    def set_up(self) -> None:
        if not self._is_set_up:
            self._check_setup(self._worker(self._setup))
            self._is_set_up = True

    def ask(self, question: bytes, work_s: float) -> bytes:
        self.set_up()
        return self._worker(question)

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass


def _no_limit(amount: float) -> None:
    """A limit would be that of the tests' process."""


@contextmanager
def rendering_here() -> Iterator[None]:
    """What makes renderers in this block makes them without processes."""
    with mock.patch.object(renderer, "Helper", TemplateHere):
        yield
