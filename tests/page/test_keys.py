"""Keys in the live page: asked for where they are needed, kept in the tab, and sent by headers
alone."""

from __future__ import annotations

from tests.page.conftest import Look
from tests.server.fake import running
from tests.server.pictured import HOSTILE, pictured
from weft.config.server import ServerConfig


def test_the_engine_is_shown_with_the_key_and_hostile_names_stay_text(look: Look) -> None:
    config = ServerConfig(api_key="user-key", admin_api_key="admin-key", drain_s=1.0)
    with running(config) as server:
        asked = pictured(server)
        page = look(server.url)
        page.expected += ["401", "403"]
        page.see("#gate-why", "the API key is missing or wrong")
        assert not asked
        page.page.fill("#admin-key", "wrong")
        page.page.keyboard.press("Enter")
        page.see("#gate-why", "the API key is missing or wrong")
        page.page.fill("#admin-key", "user-key")
        page.page.keyboard.press("Enter")
        page.see("#gate-why", "this route needs the administration key")
        page.page.fill("#admin-key", "admin-key")
        page.page.keyboard.press("Enter")
        page.live()
        label = page.see("#rows .lane").get_attribute("title")
        assert label is not None
        assert label.startswith(HOSTILE)
        assert page.page.locator("#rows script").count() == 0
        page.page.fill("#text", "hello")
        page.page.press("#text", "Enter")
        page.see(".it", "Hello, wörld!")
        assert page.page.evaluate("() => document.cookie + location.href").find("key") < 0
        assert page.page.evaluate("() => JSON.stringify(localStorage)").find("key") < 0
        page.page.reload()
        page.live()
        page.leave()
