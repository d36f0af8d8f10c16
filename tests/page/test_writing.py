"""How the page draws an answer that grows: as the whole would be drawn, and no block twice."""

from __future__ import annotations

import json
from typing import Any

from tests.page.browser import PHONE, Watched
from tests.page.conftest import Look
from tests.page.long_answers import LONG, NUM_LINES
from tests.page.talk import RICH
from tests.server.fake import RunningServer

WRITE = """async ([text, size]) => {
  const { Writing } = await import("./page/text/writing.js");
  const box = document.createElement("div");
  box.className = "md";
  const log = document.getElementById("log");
  log.replaceChildren(box);
  const writing = new Writing(box);
  let removed = 0;
  const count = (all) => { for (const one of all) removed += one.removedNodes.length; };
  const watcher = new MutationObserver(count);
  watcher.observe(box, { childList: true, subtree: true });
  let longest = 0;
  let pieces = 0;
  for (let end = size; ; end += size) {
    const began = performance.now();
    if (end >= text.length) writing.end(text);
    else writing.write(text.slice(0, end));
    longest = Math.max(longest, performance.now() - began);
    pieces++;
    if (end >= text.length) break;
  }
  count(watcher.takeRecords());
  watcher.disconnect();
  const block = box.querySelector(".part, .rows") || box.firstElementChild;
  const { contentVisibility } = getComputedStyle(block);
  const { innerHTML: html, textContent: text_ } = box;
  return { html, text: text_, removed, pieces, longest, contentVisibility };
}"""


def written(page: Watched, text: str, size: int) -> dict[str, Any]:
    found: dict[str, Any] = page.page.evaluate(WRITE, [text, size])
    return found


TABLE = "| name | of |\n|---|--:|\n"


def table(num_rows: int) -> str:
    return TABLE + "".join(f"| row {number} | {number:,} |\n" for number in range(num_rows))


def test_a_growing_answer_ends_as_the_whole_one(quick: RunningServer, look: Look) -> None:
    page = look(quick.url).live()
    text = f"{RICH}\n- a\n- b\n\n~~~\ncode without an end\n"
    for text_, sizes in (
        (text, (1, 3, 7, 50)),
        (table(41), (7, 50)),
        (table(120) + "\nand more", (11, 500)),
    ):
        whole = written(page, text_, len(text_))
        for size in sizes:
            assert written(page, text_, size)["html"] == whole["html"], size


def test_a_long_table_has_its_rows_once_and_is_laid_out_only_near_the_screen(
    quick: RunningServer, look: Look
) -> None:
    page = look(quick.url).live()
    text = table(NUM_LINES)
    written(page, text, len(text) // 300)
    found = page.page.evaluate(ROWS)
    assert found["first"] == [f"row {number}" for number in range(NUM_LINES)]
    assert found["seen"] < 200
    # Columns are one below the other, also in bodies that are far apart.
    page.page.evaluate("() => document.querySelector('.long').rows[4_000].scrollIntoView()")
    lefts = page.page.evaluate(LEFTS, [0, 1, 50, 4_000, NUM_LINES])
    assert len({round(left) for left in lefts}) == 1
    # What is far from the screen is found, and copied as it stands.
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    assert page.page.evaluate(FIND, f"row {NUM_LINES - 600}") == f"row {NUM_LINES - 600}"
    page.page.keyboard.press("Control+c")
    copied = page.page.evaluate("() => navigator.clipboard.readText()")
    lines = [line for line in copied.splitlines() if line]
    assert lines[:2] == ["name\tof", "row 0\t0"]
    assert lines[2:] == [f"row {number}\t{number}" for number in range(1, 100)]
    # Programs that read screens find a table.
    assert page.page.get_by_role("columnheader").count() == 2
    assert page.page.get_by_role("cell", name="row 4999", exact=True).count() == 1


ROWS = """() => {
  const rows = [...document.querySelectorAll(".long td:first-child")];
  const isSeen = (cell) => cell.checkVisibility({ contentVisibilityAuto: true });
  return { first: rows.map((cell) => cell.textContent), seen: rows.filter(isSeen).length };
}"""
# Where the words are found. Selects the first rows, of which most are far from the screen.
FIND = """(words) => {
  window.find(words, false, false, true);
  const near = getSelection().anchorNode.textContent;
  const { rows } = document.querySelector(".long");
  getSelection().setBaseAndExtent(rows[0], 0, rows[100], rows[100].cells.length);
  return near;
}"""
LEFTS = """(numbers) => {
  const { rows } = document.querySelector(".long");
  return numbers.map((number) => rows[number].cells[1].getBoundingClientRect().left);
}"""


def test_a_long_answer_is_drawn_once_and_only_near_the_screen(
    quick: RunningServer, look: Look
) -> None:
    page = look(quick.url).live()
    for name, text in LONG.items():
        found = written(page, text, max(len(text) // 500, 1))
        lines = [line for line in text.splitlines() if line and "|-" not in line]
        plain = found["text"].count("item") or found["text"].count("value") or len(lines)
        assert plain >= NUM_LINES // 2, name
        # Drawn again for each piece, more than a million nodes would have been removed.
        assert found["removed"] < 60 * found["pieces"], name
        if name != "a list":
            assert found["contentVisibility"] == "auto", name


def test_a_phone_opens_on_the_chat(quick: RunningServer, look: Look) -> None:
    page = look(quick.url, size=PHONE).live()
    page.see("#text")
    assert not page.page.is_visible(".engine")
    assert not page.page.is_visible("#chats")
    page.page.click("#chats-show")
    page.see("#chat-search")
    page.page.keyboard.press("Escape")
    page.page.locator("#chats").wait_for(state="hidden")
    page.page.click("#tab-engine")
    page.see("#figures")
    assert not page.page.is_visible("#text")
    width = page.page.evaluate("() => document.documentElement.scrollWidth")
    assert width == PHONE["width"]


def test_the_keyboard_alone_reaches_all(quick: RunningServer, look: Look) -> None:
    page = look(quick.url).live()
    page.page.click("#tab-chat")
    page.page.click("#chat-more")
    page.page.evaluate("() => { document.body.tabIndex = -1; document.body.focus(); }")
    reached = set()
    for _ in range(150):
        page.page.keyboard.press("Tab")
        reached.add(
            page.page.evaluate(
                "() => document.activeElement.id || document.activeElement.className"
            )
        )
        if "send" in reached:
            break
    wanted = {
        "tab-both",
        "tab-engine",
        "keys-show",
        "theme",
        "chat-new",
        "chat-search",
        "chats-export",
    }
    wanted |= {
        "chats-import",
        "system",
        "temperature",
        "schema",
        "tools",
        "mcp-url",
        "user-key",
        "log",
    }
    assert wanted | {"files", "text", "send"} <= reached


def test_hostile_markdown_makes_only_harmless_nodes(quick: RunningServer, look: Look) -> None:
    page = look(quick.url).live()
    for text in ATTACKS:
        found = written(page, text, max(5, len(text) // 100))
        tags = page.page.evaluate(TAGS)
        assert set(tags) <= HARMLESS, (text, tags)
        hrefs = page.page.locator(".md a").evaluate_all("all => all.map(one => one.protocol)")
        assert set(hrefs) <= {"http:", "https:", "mailto:"}, text
        assert json.dumps(found["html"]).count("<script") == 0
    page.page.wait_for_timeout(300)  # formulas and colours come later
    assert page.complaints == []


HARMLESS = set(
    [
        "p",
        "span",
        "b",
        "em",
        "s",
        "code",
        "pre",
        "figure",
        "figcaption",
        "small",
        "button",
        "ul",
        "ol",
        "li",
        "blockquote",
        "h3",
        "h4",
        "h5",
        "h6",
        "hr",
        "br",
        "a",
        "div",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "input",
        "math",
        "mrow",
        "mi",
        "mn",
        "mo",
        "mtext",
        "mspace",
        "msup",
        "msub",
        "mfrac",
        "mstyle",
        "mtable",
        "mtr",
        "mtd",
        "mpadded",
        "merror",
        "menclose",
        "mmultiscripts",
        "mprescripts",
        "none",
        "mover",
        "munder",
        "msqrt",
        "mphantom",
    ]
)
TAGS = """() => {
  const box = document.querySelector(".md");
  const all = [...box.querySelectorAll("*")];
  const isHandler = ({ name }) => name.startsWith("on");
  const bad = all.filter((one) => [...one.attributes].some(isHandler));
  return [...new Set(all.map((one) => one.localName)), ...bad.map(() => "handler")];
}"""
ATTACKS = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "[x](javascript:alert(1)) [y](JaVaScRiPt:alert(1)) [z](data:text/html,<script>x</script>)",
    "[x](&#106;avascript:alert(1)) [y](\x01javascript:alert(1)) [z](java\nscript:alert(1))",
    '<javascript:alert(1)> <https://ok.example/"onmouseover=alert(1)>',
    '![x](https://a.example/"onerror="alert(1)) ![y](javascript:alert(1))',
    "| <img src=x onerror=alert(1)> | b |\n|---|---|\n| <svg onload=alert(1)> | [x](vbscript:x) |",
    "```<img src=x onerror=alert(1)>\n</code></pre><script>alert(1)</script>\n```",
    "```html\n<script>alert(1)</script>\n<img src=x onerror=alert(2)>\n```",
    "$\\href{javascript:x}{x}$ $\\url{javascript:x}$ $\\includegraphics{https://a.example/x}$",
    "$\\style{position:fixed;inset:0}{x}$ $\\class{engine}{x}$ $\\id{log}{x}$ $\\data{x=y}{z}$",
    "$\\text{<img src=x onerror=alert(1)>}$ $\\rule{99999em}{99999em}$ $\\def\\a{\\a\\a}\\a$",
    "$\\color{url(https://a.example)}{x}$ $\\sideset{_a}{^b}\\sum$ $\\textcolor{red;x:url(x)}{y}$",
    "[x]: javascript:alert(1)\n\n[x] [a][x]",
    '<a href="javascript:alert(1)">x</a><iframe src=//a.example></iframe><math><mtext></math>',
    "- [x] <input autofocus onfocus=alert(1)>\n1. <details ontoggle=alert(1) open>",
    ">" * 3_000 + "deep",
    "- " * 2_000 + "deep",
    "[" * 10_000 + "\n" + "*a **b " * 3_000 + "\n" + "`" * 9_000,
    "\u202e\u0000\ufeff<b>x</b>\x1b[31m &#0; &#x110000; &constructor; &toString;",
)
