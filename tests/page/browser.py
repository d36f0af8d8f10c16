"""Chromium for tests of the live page: what it does with the page, and all that it complains of."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

HANG_MS = 120_000  # whatever takes so long does not come any more
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


class Watched:
    """A page, with everything that it complained of and asked for."""

    def __init__(self, context: Any, url: str) -> None:
        self.url = url.rstrip("/") + "/"
        self.page = context.new_page()
        self.page.set_default_timeout(HANG_MS)
        self.complaints: list[str] = []
        self.expected: list[str] = []  # parts of complaints that the test brings about
        self.outside: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(f"raised {error}"))
        self.page.on("dialog", self._asked)
        self.page.on("request", self._requested)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _asked(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _requested(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.outside.append(request.url)

    def open(self) -> Watched:
        self.page.goto(self.url)
        return self

    def see(self, selector: str, text: str = "") -> Any:
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

    def check(self) -> None:
        found = [one for one in self.complaints if not any(part in one for part in self.expected)]
        assert found == []
        assert self.outside == []


@contextlib.contextmanager
def started(path: str) -> Iterator[Any]:
    """A browser. Its contexts are as separate as those of different users."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()
