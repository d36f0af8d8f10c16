"""The picker of models on the live page, with a real server that offers two."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.e2e.server import Server
from tests.page.browser import BrowserThread
from tests.page.conftest import SMALL, Look


@pytest.fixture(scope="module")
def several(browser: BrowserThread) -> Iterator[Server]:
    """Two models, of which both are loaded at the start."""
    server = Server("weft-nano", "weft-nano-draft", "--memory", "3", small=SMALL)
    yield server
    server.stop()


def test_a_server_with_one_model_has_no_picker(server: Server, look: Look) -> None:
    page = look(server.url).live()
    page.page.wait_for_timeout(300)
    assert not page.page.is_visible("#model-pick")


def test_the_chosen_model_is_shown_and_answers(several: Server, look: Look) -> None:
    page = look(several.url).live()
    page.page.wait_for_function("document.getElementById('model-pick').options.length === 2")
    assert page.text("#model") == "weft-nano"
    page.page.select_option("#model-pick", "weft-nano-draft")
    page.page.wait_for_function("document.title === 'weft-nano-draft · weft'")
    page.page.fill("#text", "hello")
    page.page.press("#text", "Enter")
    page.see(".it .after", "tokens")
    shown = several.get("/models")["data"]
    assert [one["id"] for one in shown] == ["weft-nano", "weft-nano-draft"]
    rid = page.see(".after button", "Story")
    rid.click()
    page.see("#story .times li", "finished")


def test_a_model_is_unloaded_and_loaded_with_its_progress(several: Server, look: Look) -> None:
    page = look(several.url).live()
    page.page.wait_for_function("document.getElementById('model-pick').options.length === 2")
    page.page.select_option("#model-pick", "weft-nano-draft")
    page.see("#model-load", "Unload").click()
    page.see("#model-load", re.compile("^Load"))
    page.page.wait_for_function(
        "document.getElementById('model-pick').textContent.includes('(unloaded)')"
    )
    page.expected += ["409"]
    page.page.click("#model-load")
    page.see("#model-progress")
    page.see("#model-load", "Unload")
    page.live()
    page.page.select_option("#model-pick", "weft-nano")
