"""The engine's half of the live page agrees with what the server tells programs."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import Server, wait_until
from tests.page.conftest import Look
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
        listed = server.get("/requests")["requests"]
        running = [row for row in listed if row["position"] is None]
        waiting = [row for row in listed if row["position"] is not None]
        assert (len(running), len(waiting)) == (4, 36)
        page.see("#queue-text", "generation is paused (in_place)")
        lanes = page.page.locator("#rows .lane")
        told = [str(lane.get_attribute("aria-label")) for lane in lanes.all()]
        for row, words in zip(running, told, strict=True):
            assert words.startswith(f"{row['rid']}: {row['output_tokens']} of 400 tokens")
            assert f"{row['cached_tokens']} of {row['prompt_tokens']} prompt tokens" in words
        why = page.page.locator("#queue .why").all_text_contents()
        assert why == [row["why"] for row in waiting]
        load = server.load()
        figures = page.page.locator("#figures dd").all_text_contents()
        assert figures[3:5] == ["4of 4", "36"]
        stats = load["stats"]
        owners = [stats["kv_used"], stats["kv_evictable"], stats["kv_held"]]
        free = stats["kv_tokens"] - sum(owners)
        legend = page.page.locator(".memory-legend li:visible b").all_text_contents()
        assert [numbers(text)[0] for text in legend] == [*owners, free]
        last = int(page.page.locator("#steps").get_attribute("aria-valuemax") or -1)
        assert last == stats["total_steps"] - 1
        # As Prometheus gets them, and Grafana shows them.
        told = metrics(server)
        assert (told["weft:num_running_reqs"], told["weft:num_queue_reqs"]) == (4, 36)
        assert figures[5] == f"{100 * told['weft:token_usage']:.0f}%"
        of_owner = ["num_used", "kv_evictable", "kv_held", "kv_available"]
        assert [told[f"weft:{name}_tokens"] for name in of_owner] == [*owners, free]
        stats_of = {panel["title"] for panel in PANELS if panel["type"] == "stat"}
        assert set(page.page.locator("#figures dt").all_text_contents()) <= stats_of
        (kv,) = [panel for panel in PANELS if panel["title"] == "KV tokens"]
        names = page.page.locator(".memory-legend li").evaluate_all(NAMES)
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
    assert re.search(r"step \d+ · (decoding|prompts), 1 row, 1 token in", last)


def test_a_node_of_the_tree_shows_its_text(server: Server, look: Look) -> None:
    server.post("/v1/completions", prompt="The old harbour lay in the fog. " * 4, max_tokens=1)
    page = look(server.url).live()
    page.see("#tree button", "The old harbour").click()
    page.see("#node", "The old harbour lay in the fog.")


def test_several_tabs_show_the_same(server: Server, look: Look) -> None:
    pages = [look(server.url) for _ in range(3)]
    for page in pages:
        page.live()
    server.post("/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
    total = server.load()["stats"]["total_steps"]
    for page in pages:
        page.see(f"#steps[aria-valuemax='{total - 1}']")


def test_a_page_comes_back_when_the_server_does(look: Look) -> None:
    with running() as first:
        pictured(first)
        page = look(first.url).live()
        page.expected += ["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY_RESPONSE"]
        page.expected += ["ERR_CONNECTION_RESET", "503"]
        first.call(first.readiness.drain)
    page.see("#dot.away")
    with running(port=first.port) as again:
        pictured(again)
        page.live()
        page.see("#state", "up")
        page.leave()


def test_each_of_several_engines_is_there_in_small_and_one_of_them_large(look: Look) -> None:
    with running() as server:
        asked = pictured(server, num_engines=3)
        page = look(server.url).live()
        page.see("#engines button:nth-child(3)", "1 running")
        page.see(".pins li", HOSTILE)
        page.page.click("#engines button:nth-child(2)")
        page.see("#rows .lane[aria-label^='of engine 1']")
        page.see("#engines [aria-pressed=true]", "Engine 1")
        # Each is asked for what is new.
        assert wait_until(lambda: len(asked[-1].seen) == 3)
        page.leave()


@pytest.mark.parametrize("size", [(1380, 900), (390, 844)], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_roles_and_contrast_are_right(
    server: Server, look: Look, scheme: str, size: tuple[int, int]
) -> None:
    width, height = size
    page = look(server.url, {"width": width, "height": height}, scheme).live()
    complain: Callable[[str], list[str]] = page.page.evaluate
    assert complain(NAMELESS) == []
    assert complain(PALE) == []
    levels = page.page.locator("h1, h2, h3").evaluate_all("all => all.map(one => one.tagName)")
    assert levels[0] == "H1"
    assert set(levels[1:]) == {"H2"}
    # Nothing is wider than the window.
    assert page.page.evaluate("() => document.documentElement.scrollWidth") <= width
    ids = page.page.locator("[id]").evaluate_all("all => all.map(one => one.id)")
    assert len(ids) == len(set(ids))


NAMELESS = """() => {
  const found = [];
  for (const one of document.querySelectorAll("button, input, textarea, [role=slider], [role=img], section")) {
    if (!one.checkVisibility()) continue;
    const by = one.getAttribute("aria-labelledby");
    const name = one.getAttribute("aria-label") || (by && document.getElementById(by)?.textContent)
      || one.labels?.[0]?.textContent || one.textContent.trim();
    if (!name) found.push(one.outerHTML.slice(0, 90));
  }
  for (const one of document.querySelectorAll("img")) if (!one.hasAttribute("alt")) found.push("img");
  if (document.documentElement.lang !== "en" || !document.title) found.push("html");
  return found;
}"""

# The least contrast of WCAG 2, level AA: 4.5, or 3 for large text.
PALE = """() => {
  const box = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    box.clearRect(0, 0, 1, 1); box.fillStyle = colour; box.fillRect(0, 0, 1, 1);
    return [...box.getImageData(0, 0, 1, 1).data];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] > 250) return colour;
    }
    return rgba(getComputedStyle(document.body).backgroundColor);
  };
  const found = [];
  for (const one of document.querySelectorAll("body *")) {
    const said = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!said || !one.checkVisibility() || one.closest(".sr, .skip, noscript")) continue;
    const style = getComputedStyle(one);
    const [a, b] = [light(rgba(style.color)), light(ground(one))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
    if (ratio < least) found.push(`${ratio.toFixed(2)} ${one.tagName} ${one.className} ${one.textContent.slice(0, 30)}`);
  }
  return found;
}"""
