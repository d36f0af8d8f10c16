"""What axe, the checker of accessibility, has to say of a page: on a desk in light and in dark
colours, and on a phone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.browser import PHONE, SIZE, Watched

RUN = """async (options) => {
  const found = await axe.run({ resultTypes: ["violations"], ...options });
  const why = (node) => [...node.any, ...node.all, ...node.none].map((one) => one.message).join("; ");
  return found.violations.flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.html.slice(0, 90)}: ${why(node)}`));
}"""
WIDTH = "() => document.documentElement.scrollWidth"
IS_THERE = "() => typeof axe === 'object'"
CONTRAST = "color-contrast"  # takes nearly all of the time, and is the same in all sizes


def on_a_desk(page: Watched) -> list[str]:
    found = _run(page, {})
    page.page.emulate_media(color_scheme="dark")
    found += _run(page, {"runOnly": [CONTRAST]})
    page.page.emulate_media(color_scheme="light")
    return found


def on_a_phone(page: Watched) -> list[str]:
    """Also whether something is wider than the screen."""
    page.page.set_viewport_size(PHONE)
    width = page.page.evaluate(WIDTH)
    found = _run(page, {"rules": {CONTRAST: {"enabled": False}}})
    if width > PHONE["width"]:
        found.append(f"the page is {width} pixels wide on a screen of {PHONE['width']}")
    page.page.set_viewport_size(SIZE)
    return found


def _run(page: Watched, options: dict[str, Any]) -> list[str]:
    tool = pytest.importorskip("axe_playwright_python.base", reason="there is no axe")
    if not page.page.evaluate(IS_THERE):
        page.page.evaluate(tool.AXE_SCRIPT)
    found: list[str] = page.page.evaluate(RUN, options)
    return found
