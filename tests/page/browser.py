"""Chromium for tests of the live page: what it does with the page, and all that it complains of."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
HANG_MS = 240_000  # whatever takes so long does not come any more
# The same for all that one test does: longer than `tests/hanging.py` ever lets it take.
HANG_S = 1_600.0
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find() -> str | None:
    """The browser of this machine, if there is one."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path is not None:
            return path
    return None


# All that a page keeps.
FORGET = """() => new Promise((done) => {
  sessionStorage.clear();
  localStorage.clear();
  const forgotten = indexedDB.deleteDatabase("weft");
  forgotten.onsuccess = forgotten.onerror = forgotten.onblocked = done;
})"""
SIZE = {"width": 1380, "height": 900}
PHONE = {"width": 390, "height": 844}


class Watched:
    """A page in a tab, with everything that it complained of and asked for."""

    def __init__(self, tab: Any, url: str) -> None:
        self.url = url.rstrip("/") + "/"
        self.page = tab
        self.page.set_default_timeout(HANG_MS)
        self.complaints: list[str] = []
        self.expected: list[str] = []  # parts of complaints that the test brings about
        self.outside: list[str] = []
        self.outside_allowed: list[str] = []  # beginnings of addresses that the test answers for
        self._listeners = {
            "console": self._said,
            "pageerror": self._raised,
            "dialog": self._asked,
            "request": self._requested,
        }
        for name, listener in self._listeners.items():
            self.page.on(name, listener)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _raised(self, error: Any) -> None:
        self.complaints.append(f"raised {error}")

    def _asked(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _requested(self, request: Any) -> None:
        allowed = (self.url, "data:", "blob:", *self.outside_allowed)
        if not request.url.startswith(allowed):
            self.outside.append(request.url)

    def open(self) -> Watched:
        self.page.goto(self.url)
        return self

    def see(self, selector: str, text: str | re.Pattern[str] = "") -> Any:
        """The first element there with this text, when it is to be seen."""
        found = self.page.locator(selector, has_text=text).first
        found.wait_for()
        return found

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.text_content())

    def live(self) -> Watched:
        """When the first picture is there."""
        self.see("#dot.live")
        return self

    def leave(self) -> None:
        """Nothing of the page stays in its tab. What it says of that is not its fault."""
        for name, listener in self._listeners.items():
            self.page.remove_listener(name, listener)
        if self.page.url.startswith(self.url):
            self.page.evaluate(FORGET)
        self.page.unroute_all()
        self.page.goto("about:blank")

    def check(self) -> None:
        found = [one for one in self.complaints if not any(part in one for part in self.expected)]
        assert not found, found
        assert self.outside == []


@contextlib.contextmanager
def started(path: str) -> Iterator[Any]:
    """A browser, for this thread alone, in which no other event loop can run meanwhile. Its
    contexts are as separate as those of different users."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


class BrowserThread:
    """A thread with a browser: what is done with it has to be done there (`do`).

    Playwright leaves an event loop running in the thread that uses it. In the thread of pytest,
    it would stand in the way of all tests that run one of their own.
    """

    def __init__(self, path: str) -> None:
        self.tabs: list[Any] = []  # that are open, and show nothing
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._browser: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(path,), daemon=True)
        self._thread.start()
        self.browser = self._browser.result(HANG_S)

    def do(self, call: Callable[[], T]) -> T:
        """What `call()` returns or raises there."""
        if threading.current_thread() is self._thread:
            return call()
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(call())
            except BaseException as exc:
                done.set_exception(exc)

        self._work.put(work)
        return done.result(HANG_S)

    def tab(self) -> Any:
        """A page that shows nothing, of a user of its own."""
        if self.tabs:
            return self.tabs.pop()
        return self.browser.new_context().new_page()

    def end(self) -> None:
        self._work.put(None)
        self._thread.join(HANG_S)

    def _run(self, path: str) -> None:
        try:
            with started(path) as browser:
                self._browser.set_result(browser)
                while (work := self._work.get()) is not None:
                    work()
        except BaseException as exc:
            if self._browser.done():
                raise
            self._browser.set_exception(exc)
