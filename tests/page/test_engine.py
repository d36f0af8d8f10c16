"""The engine's half of the live page agrees with what the server tells programs."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import Server, wait_until
from tests.page.axe import on_a_desk, on_a_phone
from tests.page.browser import PHONE, BrowserThread, Watched
from tests.page.conftest import Look
from tests.server.expert_record import Recording
from tests.server.fake import running
from tests.server.pictured import HOSTILE, pictured

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "weft.json"
PANELS = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
NAMES = "all => all.map(one => one.firstChild.textContent.trim())"


def numbers(text: str) -> list[int]:
    return [int(word.replace(",", "")) for word in re.findall(r"\d[\d,]*", text)]


def metrics(server: Server) -> dict[str, float]:
    """The numbers of /metrics, summed up over their labels."""
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found: dict[str, float] = defaultdict(float)
    for family in families:
        for sample in family.samples:
            found[sample.name] += sample.value
    return found


def test_forty_requests_are_as_the_server_lists_them(server: Server, look: Look) -> None:
    page = look(server.url).live()

    def ask(number: int) -> None:
        server.post("/v1/completions", prompt=f"{number} " * 20, max_tokens=400, ignore_eos=True)

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    server.post("/slow_down", forward_sleep_time=0.05)
    for thread in asking:
        thread.start()
    try:
        assert wait_until(lambda: server.load()["num_total_reqs"] == 40)
        assert wait_until(lambda: server.load()["num_running_reqs"] == 4)
        server.post("/pause_generation", mode="in_place")
        page.see("#queue-text", "generation is paused (in_place)")
        # The step that ran when it was paused has its end, and is shown.
        last = server.load()["stats"]["total_steps"] - 1
        page.see(f"#steps[aria-valuemax='{last}']")
        listed = server.get("/requests")["requests"]
        running = [row for row in listed if row["position"] is None]
        waiting = [row for row in listed if row["position"] is not None]
        assert len(running) == 4
        assert len(waiting) == 36
        for row in running:
            words = page.see(f"#rows .lane[title^='{row['rid']}: {row['output_tokens']} of 400']")
            cached = f"{row['cached_tokens']} of {row['prompt_tokens']} prompt tokens"
            assert cached in str(words.get_attribute("title"))
        names = page.page.locator("#rows .rid").all_text_contents()
        assert names == [row["rid"] for row in running]
        page.see("#queue .why", waiting[0]["why"])
        why = page.page.locator("#queue .why").all_text_contents()
        assert why == [row["why"] for row in waiting]
        load = server.load()
        figures = page.page.locator("#figures dd").all_text_contents()
        assert figures[3:5] == ["4of 4", "36"]
        stats = load["stats"]
        owners = [stats["kv_used"], stats["kv_evictable"], stats["kv_held"]]
        free = stats["kv_tokens"] - sum(owners)
        legend = page.page.locator("#memory .legend li:visible b").all_text_contents()
        assert [numbers(text)[0] for text in legend] == [*owners, free]
        assert stats["total_steps"] - 1 == last
        # As Prometheus gets them, and Grafana shows them.
        told = metrics(server)
        assert told["weft:num_running_reqs"] == 4
        assert told["weft:num_queue_reqs"] == 36
        assert figures[5] == f"{100 * told['weft:token_usage']:.0f}%"
        of_owner = ["num_used", "kv_evictable", "kv_held", "kv_available"]
        assert [told[f"weft:{name}_tokens"] for name in of_owner] == [*owners, free]
        stats_of = {panel["title"] for panel in PANELS if panel["type"] == "stat"}
        assert set(page.page.locator("#figures dt").all_text_contents()) <= stats_of
        (kv,) = [panel for panel in PANELS if panel["title"] == "KV tokens"]
        names = page.page.locator("#memory .legend li").evaluate_all(NAMES)
        assert names == [target["legendFormat"] for target in kv["targets"]]
    finally:
        server.post("/continue_generation")
        server.post("/slow_down", forward_sleep_time=None)
        server.post("/abort_request", abort_all=True)
        for thread in asking:
            thread.join()
    page.see("#rows .none")
    page.see("#queue .none")


def test_steps_can_be_read_by_the_keyboard(server: Server, look: Look) -> None:
    page = look(server.url).live()
    server.post("/v1/completions", prompt="hello", max_tokens=12, ignore_eos=True)
    total = server.load()["stats"]["total_steps"]
    page.see(f"#steps[aria-valuemax='{total - 1}']")
    page.page.click("#pause")
    page.page.focus("#steps")
    page.page.keyboard.press("End")
    last = page.page.locator("#steps").get_attribute("aria-valuetext") or ""
    page.page.keyboard.press("ArrowLeft")
    before = page.page.locator("#steps").get_attribute("aria-valuetext") or ""
    assert numbers(last)[0] == numbers(before)[0] + 1
    assert re.search(r"step \d+ · (decoding|prompts) · 1 row · 1 token in", last)
    assert page.text("#steps-text") == before


def test_a_node_of_the_tree_shows_its_text_and_users_and_is_pinned_and_forgotten(
    server: Server, look: Look
) -> None:
    server.post("/flush_cache")  # so that it is broad enough for words
    for times in (4, 5):
        server.post("/v1/completions", prompt="The old harbour sleeps. " * times, max_tokens=1)
    page = look(server.url).live()
    # A walk that began between the two would show a node that is divided since.
    cached = server.load()["stats"]["kv_evictable"]
    page.see("#tree-text", re.compile(rf"^{cached:,} tokens in"))
    page.see("#tree button", "The old harbour").click()
    page.see("#node pre", "The old harbour sleeps. The old")
    page.see("#node .facts", "1 request began with it")
    page.see("#node button", "Pin").click()
    page.see("#node .after", "pinned as pin-")
    [pin] = server.get("/cache")["pins"]
    page.see(".pins li", pin["name"])
    page.page.click("#tree [aria-pressed=true]")
    page.see("#tree button.used", "The old harbour").click()
    page.see("#node .facts", f"kept by {pin['name']}")
    page.see("#node button", "Forget").click()
    page.see("#node .after", "forgotten · the rest is in use")
    unpin = urllib.request.Request(f"{server.url}/cache/pin/{pin['name']}", method="DELETE")
    urllib.request.urlopen(unpin).close()
    page.page.click("#tree [aria-pressed=true]")
    page.see("#tree button", "The old harbour").click()
    page.see("#node button", "Forget").click()
    page.see("#node .after", "tokens forgotten")


def has_come_to(page: Watched, least: int) -> bool:
    """Whether the page shows this step, or a later one."""
    return int(page.page.locator("#steps").get_attribute("aria-valuemax") or -1) >= least


@pytest.mark.parametrize("num_tabs", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_tabs_show_the_same_and_are_one_viewer_for_the_engine(
    browser: BrowserThread, num_tabs: int
) -> None:
    with running() as server, contextlib.ExitStack() as ends:
        asked = pictured(server)
        tabs: list[Watched] = []
        for number in range(num_tabs):
            # A browser opens at most six connections for one user.
            if number % 5 == 0:
                user = browser.browser.new_context(viewport=PHONE, reduced_motion="reduce")
                ends.callback(user.close)
            tabs.append(Watched(user.new_page(), server.url).open())
        for tab in tabs:
            tab.live()
        last = len(asked)
        for tab in tabs:
            assert wait_until(functools.partial(has_come_to, tab, last))
            tab.check()
        # No question is asked for what one of them has seen.
        seen = [one.since_step for one in asked]
        assert seen == [-1, *range(len(seen) - 1)]


def test_a_hidden_tab_asks_for_nothing(look: Look) -> None:
    with running() as server:
        pictured(server)
        page = look(server.url).live()
        page.expected += ["ERR_ABORTED"]
        with page.page.expect_event("requestfailed") as ended:
            page.page.evaluate(HIDDEN, True)
        assert ended.value.url.endswith("/events")
        page.see("#state", "hidden")
        page.page.evaluate(HIDDEN, False)
        page.live()
        page.leave()


def test_a_page_comes_back_when_the_server_does(look: Look) -> None:
    with running() as first:
        pictured(first)
        page = look(first.url).live()
        shown = page.page.locator("#figures dd").all_text_contents()
        page.expected += ["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY_RESPONSE"]
        page.expected += ["ERR_CONNECTION_RESET", "503"]
        first.call(first.readiness.drain)
    # What was shown stays, grey, and it is said that it is an old picture.
    page.see("#dot.away")
    page.see("#state", "connecting again")
    panels = page.page.evaluate(LOOKS)
    assert len(panels) == 5
    assert {panel["filter"] for panel in panels} == {"grayscale(1)"}
    assert all(float(panel["opacity"]) < 1 for panel in panels)
    assert page.page.locator("#figures dd").all_text_contents() == shown
    # The chat does not stand for the engine: one can read and write in it.
    chat = page.page.evaluate("() => getComputedStyle(document.getElementById('chat')).opacity")
    assert chat == "1"
    with running(port=first.port) as again:
        pictured(again)
        page.live()
        page.see("#state", "up")
        assert {panel["opacity"] for panel in page.page.evaluate(LOOKS)} == {"1"}
        page.leave()


def test_a_server_that_is_silent_is_shown_grey_until_it_speaks(look: Look) -> None:
    with running() as server:
        unanswered = server.engine.send
        pictured(server)
        page = look(server.url).live()
        answered = server.engine.send
        server.engine.send = unanswered  # type: ignore[method-assign]
        page.page.evaluate(LATER, 15_000)
        page.see("#state", re.compile(r"no picture for 1\d s"))
        assert {panel["filter"] for panel in page.page.evaluate(LOOKS)} == {"grayscale(1)"}
        server.engine.send = answered  # type: ignore[method-assign]
        page.live()
        assert {panel["filter"] for panel in page.page.evaluate(LOOKS)} == {"none"}
        page.leave()


LATER = """(passed_ms) => {
  const now = performance.now.bind(performance);
  performance.now = () => now() + passed_ms;
}"""
LOOKS = """() => {
  const parts = document.querySelectorAll(".engine > :is(.panel, dl, .pair):not([hidden])");
  return [...parts].map((one) => {
    const { opacity, filter } = getComputedStyle(one);
    return { opacity, filter };
  });
}"""


def test_each_of_several_engines_is_there_in_small_and_one_of_them_large(look: Look) -> None:
    with running() as server:
        asked = pictured(server, num_engines=3)
        page = look(server.url).live()
        page.see("#engines button:nth-child(3)", "1 running")
        page.see(".pins li", HOSTILE)
        # The memory of pins is in use, and has a part of its own.
        legend = page.page.locator("#memory .legend li:visible b").all_text_contents()
        assert legend == ["4", "0", "6", "90"]
        assert page.page.locator("#experts").is_hidden()
        page.page.click("#engines button:nth-child(2)")
        page.see("#rows .lane[title^='of engine 1']")
        page.see("#engines [aria-pressed=true]", "Engine 1")
        # Each is asked for what is new.
        assert wait_until(lambda: len(asked[-1].seen) == 3)
        page.leave()


def test_experts_are_drawn_while_they_are_counted(look: Look) -> None:
    with running() as server:
        pictured(server)
        page = look(server.url).live()
        # What the engine has is known when it is ready, and told to who looks already.
        engine = Recording(server)
        page.see("#experts-text", "8 choices")
        assert not engine.is_on
        page.page.click("#experts-count")
        page.see("#experts-count", "Stop")
        assert engine.is_on
        line = page.see("#layers li", "layer 1")
        assert str(line.text_content()).endswith("0: 1.5 ×")
        cells = str(line.locator(".pool").get_attribute("style"))
        # Of an even share a third of the colour, of half more a half, and of three times all of it.
        assert [round(float(share)) for share in re.findall(r"([\d.]+)%, var", cells)] == [
            50,
            12,
            38,
        ]
        assert on_a_desk(page) == []
        assert on_a_phone(page) == []
        page.page.click("#experts-count")
        page.see("#experts-count", "Count")
        assert not engine.is_on
        page.leave()


HIDDEN = """(isHidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => isHidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_completions_of_one_request_have_a_bar_each(server: Server, look: Look) -> None:
    page = look(server.url).live()
    texts = page.page.evaluate(
        """async () => {
            const { listOf, el } = await import("./page/parts.js");
            const box = document.createElement("ul");
            const show = listOf(box, (name) => el("li", "", name), (item, i) => { item.title = String(i); });
            const texts = () => [...box.children].map((item) => item.textContent + item.title);
            show(["a", "a", "b", "a"]);
            const first = texts();
            show(["a", "b"]);
            return [first, texts()];
        }"""
    )
    assert texts == [["a0", "a1", "b2", "a3"], ["a0", "b1"]]
