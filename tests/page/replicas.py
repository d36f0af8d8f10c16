"""Looks at a real server with two engines in a browser: both are seen, one is killed, the page says
so and goes on, and the engine comes back.

python -m tests.page.replicas
"""

from __future__ import annotations

import contextlib
import threading
import urllib.error
from collections.abc import Iterator

import psutil

from tests.e2e.server import Server
from tests.page.browser import SIZE, Watched, find, started

NUM_USERS = 6
SMALL = ("--kv-tokens", "8192", "--max-running-requests", "4", "--threads", "1")


class Replicas(Server):
    """With two engines."""

    def _find_engine(self) -> psutil.Process:
        return self.engines()[-1]

    def engines(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [one for one in children if "worker" in " ".join(one.cmdline())]


@contextlib.contextmanager
def asked(server: Server) -> Iterator[None]:
    """Users who ask one question after the other; what an engine loses when it is killed ends with
    an error."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        while not is_over.is_set():
            try:
                server.post("/v1/completions", prompt=f"{number} ships " * 9, max_tokens=200)
            except urllib.error.HTTPError as exc:
                exc.close()

    users = [threading.Thread(target=ask, args=(number,)) for number in range(NUM_USERS)]
    for user in users:
        user.start()
    yield
    is_over.set()
    for user in users:
        user.join()


def look(page: Watched, server: Replicas) -> None:
    tiles = page.page.locator("#engines button")
    page.live().see("#engines button:nth-child(2)", "running")
    print("both are seen:", tiles.all_text_contents())
    server.engine.kill()
    page.see("#engines button:nth-child(2)", "does not answer")
    before = page.text("#steps-text")
    print("one is killed:", tiles.all_text_contents(), page.text("#state"))
    page.page.wait_for_timeout(1_000)
    assert page.text("#steps-text") != before, "the other one does not go on"
    assert page.page.locator("#dot.live").count() == 1
    page.see("#engines button:nth-child(2)", "running")
    print("it comes back:", tiles.all_text_contents())
    page.page.click("#engines button:nth-child(2)")
    page.see("#engines [aria-pressed=true]", "Engine 1")
    page.see("#steps-text", "median")
    page.check()


def main() -> None:
    path = find()
    if path is None:
        raise SystemExit("there is no browser: apt install chromium")
    server = Replicas("weft-nano", "--dp-size", "2", small=SMALL)
    try:
        with asked(server), started(path) as browser:
            tab = browser.new_context(viewport=SIZE, reduced_motion="reduce").new_page()
            look(Watched(tab, server.url).open(), server)
    finally:
        server.stop()
    print("as it should be")


if __name__ == "__main__":
    main()
