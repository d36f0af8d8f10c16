"""Nobody is kept out of the live page: axe finds nothing in any of its states."""

from __future__ import annotations

import threading
import urllib.error

from tests.e2e.server import Server
from tests.page.axe import on_a_desk, on_a_phone
from tests.page.browser import PHONE
from tests.page.conftest import Look
from tests.page.talk import RICH, answers, call, say
from tests.server.fake import RunningServer


def test_axe_finds_nothing_in_a_page_at_rest(server: Server, look: Look) -> None:
    page = look(server.url).live()
    page.see("#rows .none")
    assert on_a_desk(page) == []
    assert on_a_phone(page) == []


def test_axe_finds_nothing_in_a_page_full_of_work(server: Server, look: Look) -> None:
    page = look(server.url).live()
    page.page.fill("#text", "what does os.path.join do?")
    page.page.press("#text", "Enter")
    page.see(".it .after", "tokens")
    page.page.click("#chat-more")

    def ask(number: int) -> None:
        prompt = f"{number} ships in the old harbour. " * 4
        try:
            server.post("/v1/completions", prompt=prompt, max_tokens=400, ignore_eos=True)
        except urllib.error.HTTPError as exc:  # it is ended before it began
            exc.close()

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    with server.slowed():
        for thread in asking:
            thread.start()
        page.see("#queue .why")
        # What is shown does not change between the looks.
        server.post("/pause_generation", mode="in_place")
        page.see("#queue-text", "paused")
        page.see("#tree button", "ships").click()
        assert on_a_phone(page) == []
        page.see("#rows .lane").click()
        page.see("#story .times li")
        page.see("#rows .lane").hover()
        assert on_a_desk(page) == []
        assert on_a_phone(page) == []
        server.post("/continue_generation")
        server.post("/abort_request", abort_all=True)
        for thread in asking:
            thread.join()
    page.page.keyboard.press("Escape")
    page.page.evaluate("() => document.getElementById('tab-chat').click()")
    assert on_a_phone(page) == []


def test_axe_finds_nothing_in_a_chat_with_all_its_parts(quick: RunningServer, look: Look) -> None:
    page = look(quick.url).live()
    page.page.click("#tab-chat")
    rows = "\n\n| a | b |\n|---|---|\n" + "| one | two |\n" * 50
    answers(page, {"reasoning_content": "let me see"}, {"content": RICH + rows}, end="length")
    say(page, "show all")
    page.see(".md math")
    page.see(".it button", "Regenerate").click()
    page.see(".versions")
    page.see(".md .hl-keyword")
    page.see(".it summary").click()
    page.page.click("#chat-list .menu summary")
    assert on_a_desk(page) == []
    page.page.click("#chat-more")
    assert on_a_desk(page) == []
    assert on_a_phone(page) == []
    page.page.click("#chat-more")
    answers(page, call("weather", {"town": "Oslo"}), end="tool_calls")
    say(page, "the weather?")
    page.see(".call-form")
    assert on_a_desk(page) == []
    page.page.click("#keys-show")
    page.see("#keys-list")
    assert on_a_desk(page) == []
    page.page.keyboard.press("Escape")
    page.page.set_viewport_size(PHONE)
    page.page.click("#chats-show")
    assert on_a_phone(page) == []


def test_axe_finds_nothing_in_a_recording(film: str, look: Look) -> None:
    page = look(film)
    page.see("#film-text", "step 0 of")
    page.page.locator("#film-at").fill("60")
    page.see("#film-text", "step 60 of")
    page.see(".lane").click()
    page.see("#story .times li", "finished")
    assert on_a_desk(page) == []
    assert on_a_phone(page) == []
