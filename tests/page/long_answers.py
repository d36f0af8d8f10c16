"""Measures the frames of the live page while an answer of 5,000 lines grows in it, and while one
scrolls through it.

    python -m tests.page.long_answers [kind ...]

Frames are those that the browser asks for (`requestAnimationFrame`), without a graphics card.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tests.page.browser import SIZE, Watched, find, started
from tests.page.frames import COUNT, counters
from tests.server.fake import running
from tests.server.pictured import pictured

NUM_LINES = 5_000
LONG = {
    "paragraphs": "A line of *words* with `code` and **more**.\n\n" * (NUM_LINES // 2),
    "one paragraph": "A line of *words* with `code`.\n" * NUM_LINES,
    "a list": "".join(f"- item {number} with *words*\n" for number in range(NUM_LINES)),
    "a table": "| a | b |\n|---|--:|\n" + "| one | 2 |\n" * NUM_LINES,
    "a wide table": "| name | what | of | until |\n|---|---|--:|---|\n"
    + "| `name` | a text of *some* words, which has two lines | 1,234 | 2026 |\n" * NUM_LINES,
    "code": "```python\n" + "value = compute(1, 'two')  # three\n" * NUM_LINES + "```\n",
}
PIECES = 400
LATE_MS = 25
# A stream that the page reads as that of a server: a piece a frame.
STREAM = """([text, pieces]) => {
  const asked = window.fetch;
  window.fetch = (path, ...rest) => {
    if (!String(path).includes("chat/completions")) return asked(path, ...rest);
    const size = Math.ceil(text.length / pieces);
    const write = (to, choice) => {
      const event = JSON.stringify({ choices: [choice] });
      to.enqueue(new TextEncoder().encode(`data: ${event}\\n\\n`));
    };
    const body = new ReadableStream({ start(to) {
      let at = 0;
      const timer = setInterval(() => {
        write(to, { delta: { content: text.slice(at, at + size) } });
        at += size;
        if (at < text.length) return;
        clearInterval(timer);
        write(to, { delta: {}, finish_reason: "stop" });
        to.close();
      }, 17);
    } });
    return Promise.resolve(new Response(body));
  };
}"""
# Up from the end by a third of a screen a frame at most 170 times, as a hand turns a wheel.
SCROLL = """() => new Promise((done) => {
  const log = document.getElementById("log");
  let left = 170;
  const step = () => {
    if (!left-- || !log.scrollTop) return done();
    log.scrollBy(0, -300);
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})"""


def told(gaps: list[float]) -> str:
    late = sum(gap > LATE_MS for gap in gaps)
    middle, high = np.percentile(gaps, [50, 95])
    return f"{middle:.1f} ms, p95 {high:.1f}, {late} of {len(gaps)} later than {LATE_MS} ms"


class Frames:
    """The frames of a page since the last look, and what its main thread did for them."""

    def __init__(self, page: Watched) -> None:
        self._page = page.page
        self._page.evaluate(COUNT)
        self._devtools = page.page.context.new_cdp_session(page.page)
        self._devtools.send("Performance.enable")
        self._before = counters(self._devtools)

    def tell(self, name: str) -> None:
        before = self._before
        gaps = self.take()
        parts = ("Task", "Script", "RecalcStyle", "Layout")
        spent = {
            part: self._before[f"{part}Duration"] - before[f"{part}Duration"] for part in parts
        }
        words = ", ".join(f"{part} {1e3 * spent[part] / len(gaps):.1f}" for part in parts)
        print(f"{name}: {told(gaps)}; ms a frame: {words}", flush=True)

    def take(self) -> list[float]:
        self._before = counters(self._devtools)
        gaps: list[float] = self._page.evaluate("() => window.frames_seen.splice(0).slice(2)")
        return gaps


def measure(browser: Any, url: str, name: str) -> None:
    context = browser.new_context(viewport=SIZE, color_scheme="light")
    page = Watched(context.new_page(), url).open().live()
    page.page.click("#tab-chat")
    page.page.evaluate(STREAM, [LONG[name], PIECES])
    frames = Frames(page)
    page.page.fill("#text", "a long one")
    page.page.press("#text", "Enter")
    page.see("#stop")
    page.see("#send")
    frames.tell(f"{name}, growing")
    page.page.wait_for_timeout(1_000)
    frames.take()
    page.page.evaluate(SCROLL)
    frames.tell(f"{name}, scrolled")
    page.check()
    context.close()


def main() -> None:
    path = find()
    if path is None:
        raise SystemExit("there is no browser: apt install chromium")
    names = sys.argv[1:] or list(LONG)
    with running() as server, started(path) as browser:
        pictured(server)
        for name in names:
            measure(browser, server.url, name)


if __name__ == "__main__":
    main()
