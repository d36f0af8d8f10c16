"""The live page over a recording: every step can be gone to, forwards and backwards."""

from __future__ import annotations

import re

from tests.page.conftest import Look


def test_a_film_is_scrubbed_step_by_step_and_tells_stories(film: str, look: Look) -> None:
    page = look(film)
    page.expected.append("404")
    page.see("#summary", "a picture of each step")
    page.see("#film-text", "step 0 of")
    page.page.locator("#film-at").fill("60")
    page.see("#film-text", "step 60 of")
    running = page.text("#rows-text")
    steps = page.text("#steps-text")
    # A jump shows the figures of its place, whatever was shown before.
    figures = page.page.locator("#figures dd").all_text_contents()
    assert float(figures[0].replace(",", "")) > 0
    page.page.click("#film-on")
    page.see("#film-text", "step 61 of")
    page.page.click("#film-back")
    page.see("#film-text", "step 60 of")
    assert page.text("#rows-text") == running
    assert page.text("#steps-text") == steps
    assert page.page.locator("#figures dd").all_text_contents() == figures
    page.see(".lane").click()
    page.see("#story .times li", "finished")
    assert page.page.get_by_role("button", name="Copy replay").count() == 0
    page.page.click("#film-play")
    # Whatever passes while nobody looks: it stays at the last one.
    page.see("#film-text", re.compile(r"step (6[3-9]|[789]\d|\d{3,}) of"))
    page.page.click("#film-play")
    assert page.page.locator("#chat").is_hidden()
