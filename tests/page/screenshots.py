"""Makes the pictures of the live page for the README and the guide: a real server under a small
load.

python -m tests.page.screenshots          writes docs/img/page-*.png
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

from tests.e2e.server import Server
from tests.page.browser import Watched, find, started
from tests.page.talk import say

IMAGES = Path(__file__).parents[2] / "docs" / "img"
SIZE = {"width": 1280, "height": 840}
PHONE = {"width": 390, "height": 780}
SYSTEM = (
    "You answer questions about Python in short sentences, with an example where it helps.",
    "You are a poet of the sea: waves, salt, and the long way home in the evening light.",
    "Translate what follows into plain English, and keep every number as it stands.",
)
QUESTIONS = (
    "what does os.path.join do?",
    "write a function that adds two numbers",
    "how do I read a file line by line?",
    "tell me about the tide",
)


class Load:
    """Nine users who ask one question after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_over = False
        self._threads = [threading.Thread(target=self._ask, args=(one,)) for one in range(9)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        while not self._is_over:
            messages = [
                {"role": "system", "content": SYSTEM[number % 3] * (1 + number % 3)},
                {"role": "user", "content": rng.choice(QUESTIONS)},
            ]
            self._server.post(
                "/v1/chat/completions",
                messages=messages,
                max_tokens=rng.randrange(60, 260),
                ignore_eos=True,
                user=f"user {number % 4}",
            )

    def end(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()


def shoot(browser: Any, server: Server, name: str, scheme: str, size: dict[str, int]) -> None:
    context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    page = Watched(context.new_page(), server.url).open().live()
    say(page, QUESTIONS[0])
    page.see(".it .after", "tokens")
    if size is SIZE:
        page.see(".after button", "Story").click()
        page.see("#story .times li", "finished")
    time.sleep(3.0)
    path = IMAGES / f"page-{name}.png"
    page.page.screenshot(path=path, timeout=120_000)
    _shrink(path)
    page.check()
    context.close()


def _shrink(path: Path) -> None:
    from PIL import Image

    with Image.open(path) as image:
        few = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def main() -> None:
    path = find()
    if path is None:
        raise SystemExit("there is no browser: apt install chromium")
    small = (
        "--kv-tokens",
        "8192",
        "--max-running-requests",
        "6",
        "--threads",
        "1",
        "--tenant-by",
        "user",
    )
    server = Server("weft-nano", small=small)
    load = Load(server)
    try:
        with started(path) as browser:
            shoot(browser, server, "desktop-light", "light", SIZE)
            shoot(browser, server, "desktop-dark", "dark", SIZE)
            shoot(browser, server, "phone-light", "light", PHONE)
    finally:
        load.end()
        server.stop()


if __name__ == "__main__":
    main()
