"""The chat of the live page, point by point as docs/guides/page.md compares it with
llama-server's."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

from tests.page.browser import Watched
from tests.page.conftest import MCP_ORIGIN, Look
from tests.page.talk import CHAT, RICH, answers, call, reload, say
from tests.server.fake import RunningServer

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "page.md"
USAGE = {
    "prompt_tokens": 1_300,
    "completion_tokens": 40,
    "prompt_tokens_details": {
        "cached_tokens": 96,
        "cache_cause": {
            "words": "the system block changed",
            "missed_tokens": 1_204,
            "missed_s": 1.9,
        },
    },
}


def opened(look: Look, server: RunningServer) -> Watched:
    return look(server.url).live()


def answered(page: Watched, question: str, answer: str, **more: Any) -> list[dict[str, Any]]:
    """Ask `question`, and wait until its `answer` is complete."""
    asked = answers(page, {"content": answer}, **more)
    say(page, question)
    page.see("#send")
    return asked


def titles(page: Watched) -> list[str]:
    found: list[str] = page.page.locator("#chat-list .title > span").all_text_contents()
    return found


def with_list(page: Watched) -> Watched:
    """The page with its list of chats."""
    page.page.click("#tab-chat")
    return page


# ---- chats


def test_chats_outlive_a_reload_and_one_is_chosen_from_the_list(
    quick: RunningServer, look: Look
) -> None:
    page = with_list(opened(look, quick))
    answered(page, "the first chat", "one")
    page.page.click("#chat-new")
    answered(page, "the second chat", "two")
    reload(page)
    page.see(".me .said", "the second chat")
    assert titles(page) == ["the second chat", "the first chat"]
    page.see("#chat-list .title", "the first chat").click()
    page.see(".it .md", "one")
    assert page.page.locator(".me").count() == 1


def test_a_search_finds_chats_by_what_was_said(quick: RunningServer, look: Look) -> None:
    page = with_list(opened(look, quick))
    answered(page, "about boats", "A sextant measures angles.")
    page.page.click("#chat-new")
    answered(page, "about cars", "Wheels.")
    page.page.keyboard.press("Control+k")
    page.page.keyboard.type("sextant ANGLES")
    page.see("#chat-list .title small", "A sextant measures")
    assert titles(page) == ["about boats"]
    page.page.fill("#chat-search", "nothing of this")
    page.see("#chat-list .none", "No chat has these words")


def test_a_chat_is_renamed_and_deleted(quick: RunningServer, look: Look) -> None:
    page = with_list(opened(look, quick))
    answered(page, "to be renamed", "well")
    page.page.click("#chat-list .menu summary")
    page.page.click("#chat-list .menu button:text('Rename')")
    page.page.keyboard.type("Harbours")
    page.page.keyboard.press("Enter")
    page.see("#chat-list .title", "Harbours")
    assert page.text("#chat-title") == "Harbours"
    page.page.click("#chat-list .menu summary")
    page.page.click("#chat-list .menu button:text('Delete')")
    page.page.click("#chat-list .menu button:text('Really?')")
    page.see("#chat-list .none", "Your chats stay in this browser")
    page.see("#log .none", "Ask something")
    reload(page)
    page.see("#chat-list .none", "Your chats stay in this browser")


def test_a_list_that_is_drawn_again_ends_no_renaming(quick: RunningServer, look: Look) -> None:
    page = with_list(opened(look, quick))
    answered(page, "to be renamed", "well")
    page.page.click("#chat-list .menu summary")
    page.page.click("#chat-list .menu button:text('Rename')")
    page.page.keyboard.type("Old ")
    other = with_list(Watched(page.page.context.new_page(), page.url).open().live())
    other.page.click("#chat-new")
    answered(other, "from another tab", "indeed")
    page.see("#chat-list .title", "from another tab")
    method = InputMethod(page)
    method.compose("ming")
    page.page.evaluate("() => import('./page/chat/list.js').then((list) => list.draw())")
    method.end("名")
    page.page.keyboard.press("Enter")
    page.see("#chat-list .title", "Old 名")
    # What has the focus keeps it, and what is open stays open.
    page.page.locator("#chat-list .menu summary").nth(1).press("Enter")
    page.page.keyboard.press("Tab")
    answered(other, "once more", "yes")
    page.see("#chat-list li:has(:text('from another tab')) ~ li .menu[open]")
    assert page.page.evaluate("() => document.activeElement.textContent") == "Rename"
    # A chat that another tab has deleted is not made again by its new title.
    page.page.keyboard.press("Enter")
    page.page.keyboard.type("Again")
    other.page.locator("#chat-list .menu summary").nth(1).click()
    other.page.locator("#chat-list .menu[open] button:text('Delete')").click()
    other.page.locator("#chat-list .menu button:text('Really?')").click()
    page.page.locator("#chat-list input").wait_for(state="detached")
    reload(page)
    page.see("#chat-list .title", "from another tab")
    assert titles(page) == ["from another tab"]
    other.check()
    other.page.close()


def test_chats_are_exported_and_imported(quick: RunningServer, look: Look, tmp_path: Path) -> None:
    page = with_list(opened(look, quick))
    answered(page, "what floats?", "**Wood** floats.")
    page.page.click("#chat-list .menu summary")
    with page.page.expect_download() as got:
        page.page.click("#chat-list .menu button:text('Markdown')")
    assert got.value.suggested_filename == "what floats.md"
    markdown = Path(got.value.path()).read_text("utf-8")
    assert markdown == "# what floats?\n\n## You\n\nwhat floats?\n\n## Model\n\n**Wood** floats.\n"
    with page.page.expect_download() as got:
        page.page.click("#chats-export")
    file = tmp_path / "chats.json"
    file.write_bytes(Path(got.value.path()).read_bytes())
    page.page.click("#chat-list .menu button:text('Delete')")
    page.page.click("#chat-list .menu button:text('Really?')")
    page.see("#chat-list .none")
    page.page.set_input_files("#chats-import", file)
    page.see(".it .md b", "Wood")
    assert titles(page) == ["what floats?"]
    file.write_text(
        '{"format": "weft-chats", "version": 1, "chats": [{"nodes": [{"role": "root"}]}]}'
    )
    page.page.set_input_files("#chats-import", file)
    page.see("#log .err", 'chats[0].nodes[0].role is "root"; it must be user, assistant, tool')


# ---- messages


def test_an_edited_question_is_a_branch_and_both_stay(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    answered(page, "how deep?", "ten feet")
    page.see(".me button", "Edit").click()
    asked = answers(page, {"content": "five feet"})
    page.page.fill(".editor textarea", "how deep is it?")
    page.page.click(".editor .do")
    page.see(".it .md", "five feet")
    assert asked[0]["messages"] == [{"role": "user", "content": "how deep is it?"}]
    assert page.text(".me .versions").strip("‹› ") == "2 of 2"
    page.page.click(".me [aria-label='Version before']")
    page.see(".it .md", "ten feet")
    reload(page)
    page.see(".it .md", "ten feet")
    page.see(".me .versions", "1 of 2")


def test_an_answer_is_asked_for_again_and_versions_are_switched(
    quick: RunningServer, look: Look
) -> None:
    page = opened(look, quick)
    answered(page, "a number?", "one")
    answers(page, {"content": "two"})
    page.see(".it button", "Regenerate").click()
    page.see(".it .md", "two")
    page.page.click(".it [aria-label='Version before']")
    page.see(".it .md", "one")
    asked = answered(page, "and then?", "three")
    assert [one["content"] for one in asked[0]["messages"]] == ["a number?", "one", "and then?"]


def test_an_answer_is_edited_and_the_chat_goes_on_from_it(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    answered(page, "a colour?", "red")
    page.see(".it button", "Edit").click()
    page.page.fill(".editor textarea", "blue")
    page.page.click(".editor .do")
    page.see(".it .md", "blue")
    asked = answered(page, "why?", "because")
    assert asked[0]["messages"][1] == {"role": "assistant", "content": "blue"}


def test_a_chat_branches_from_a_message(quick: RunningServer, look: Look) -> None:
    page = with_list(opened(look, quick))
    answered(page, "first", "one")
    answered(page, "second", "two")
    page.page.locator(".it button", has_text="Branch").first.click()
    page.see("#chat-title", "first (branch)")
    assert page.page.locator(".it .md").all_text_contents() == ["one"]
    assert page.page.locator(".it").count() == 1


def test_a_message_is_deleted_with_what_follows(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    answered(page, "first", "one")
    answered(page, "second", "two")
    page.page.locator(".me button", has_text="Delete").last.click()
    page.page.locator(".me button", has_text="Really?").click()
    page.page.locator(".me").nth(1).wait_for(state="detached")
    assert page.page.locator("#log article").count() == 2


def test_a_cut_answer_goes_on_in_its_place(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    answered(page, "count", "one, two", end="length")
    page.see(".it .after", "cut at the largest number of tokens")
    asked = answers(page, {"content": ", three"})
    page.see(".it button", "Continue").click()
    page.see(".it .md", "one, two, three")
    assert asked[0]["messages"][-1] == {"role": "assistant", "content": "one, two"}
    assert asked[0]["continue_final_message"] is True
    assert page.page.locator(".it").count() == 1


def test_a_message_is_copied(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answered(page, "a list", "- a\n- b")
    page.see(".it button", "Copy").click()
    page.see(".it button", "Copied")
    assert page.page.evaluate("() => navigator.clipboard.readText()") == "- a\n- b"


# ---- what is asked


def test_a_chat_has_its_own_system_prompt_and_sampling_and_the_rest_is_the_servers(
    quick: RunningServer, look: Look
) -> None:
    page = with_list(opened(look, quick))
    page.page.click("#chat-more")
    assert page.page.get_attribute("#temperature", "placeholder") == "1"
    page.page.fill("#system", "Be short.")
    page.page.fill("#top-k", "7")
    page.page.locator("[aria-label='Temperature as a slider']").fill("0.5")
    page.page.fill("#stop-strings", "END\nSTOP")
    page.page.fill("#more", '{"logprobs": true}')
    asked = answered(page, "hello", "hi")[0]
    assert asked["messages"][0] == {"role": "system", "content": "Be short."}
    given = {
        name: asked.get(name) for name in ("temperature", "top_k", "top_p", "stop", "logprobs")
    }
    assert given == {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": None,
        "stop": ["END", "STOP"],
        "logprobs": True,
    }
    reload(page)
    page.see(".it .md", "hi")
    assert page.page.input_value("#system") == "Be short."
    assert page.page.input_value("#top-k") == "7"


def test_what_is_typed_survives_a_reload(quick: RunningServer, look: Look, tmp_path: Path) -> None:
    page = opened(look, quick)
    page.page.fill("#text", "half a thou")
    file = tmp_path / "notes.txt"
    file.write_text("a note")
    page.page.set_input_files("#files", file)
    page.see("#shots .chip", "notes.txt")
    reload(page)
    page.see("#shots .chip", "notes.txt")
    assert page.page.input_value("#text") == "half a thou"


def test_an_answer_that_a_reload_cut_is_there_and_can_go_on(
    quick: RunningServer, look: Look
) -> None:
    page = opened(look, quick)
    page.page.evaluate(SLOW_STREAM)
    say(page, "slowly")
    page.see(".it.busy .md", "the beginning")
    page.page.wait_for_timeout(1_300)  # a growing answer is kept once a second
    reload(page)
    page.see(".it .md", "the beginning")
    page.see(".it .after", "the page was closed meanwhile")
    page.see(".it button", "Continue")


def test_an_answer_that_comes_in_another_tab_is_followed_and_was_not_cut(
    quick: RunningServer, look: Look
) -> None:
    page = opened(look, quick)
    page.page.evaluate(SLOW_STREAM)
    say(page, "slowly")
    page.see(".it.busy .md", "the beginning")
    page.page.wait_for_timeout(1_300)  # a growing answer is kept once a second
    other = Watched(page.page.context.new_page(), page.url).open().live()
    other.see(".it.busy .after", "comes in another tab")
    assert other.page.locator(".it button").count() == 0
    shown = len(other.text(".it .md"))
    other.page.wait_for_function(
        "(shown) => document.querySelector('.it .md').textContent.length > shown", arg=shown
    )
    say(other, "and now?")
    other.see("#log .err", "comes in another tab")
    assert other.page.input_value("#text") == "and now?"
    page.page.click("#stop")
    other.see(".it .after", "stopped")
    other.see(".it button", "Continue")
    # A tab that is closed answers for nothing more.
    page.page.click(".it button:text-is('Regenerate')")
    other.see(".it .after", "comes in another tab")
    page.page.goto("about:blank")
    reload(other)
    other.see(".it .after", "the page was closed meanwhile")
    other.check()
    other.page.close()
    page.open()


SLOW_STREAM = """() => {
  const asked = window.fetch;
  window.fetch = (path, ...rest) => {
    if (!String(path).includes("chat/completions")) return asked(path, ...rest);
    const body = new ReadableStream({ start(to) {
      const write = (content) => {
        const event = JSON.stringify({ choices: [{ delta: { content } }] });
        to.enqueue(new TextEncoder().encode(`data: ${event}\\n\\n`));
      };
      write("the beginning ");
      const timer = setInterval(() => write("more "), 200);
      rest[0].signal.addEventListener("abort", () => {
        clearInterval(timer);
        to.error(new DOMException("ended", "AbortError"));
      });
    } });
    return Promise.resolve(new Response(body));
  };
}"""


def test_a_message_waits_for_a_server_that_has_ended(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    page.expected.append("ERR_CONNECTION_REFUSED")
    page.page.route(CHAT, lambda route: route.abort("connectionrefused"))
    say(page, "are you there?")
    page.see(".it .err", "the server cannot be reached")
    reload(page)
    page.see(".me .said", "are you there?")
    answers(page, {"content": "again"})
    page.see(".it button", "Try again").click()
    page.see(".it .md", "again")


def test_enter_of_an_input_method_sends_nothing(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    asked = answers(page, {"content": "well"})
    page.page.fill("#text", "にほん")
    for extra in ("isComposing: true", "keyCode: 229"):
        page.page.evaluate(
            "() => document.getElementById('text').dispatchEvent(new KeyboardEvent('keydown', "
            f"{{ key: 'Enter', bubbles: true, cancelable: true, {extra} }}))"
        )
    assert page.page.input_value("#text") == "にほん"
    page.page.press("#text", "Shift+Enter")
    assert page.page.input_value("#text") == "にほん\n"
    page.page.press("#text", "Enter")
    page.see(".it .md", "well")
    assert len(asked) == 1


class InputMethod:
    """What an input method does to a page: it composes words, and takes keys for itself."""

    def __init__(self, page: Watched) -> None:
        self._devtools = page.page.context.new_cdp_session(page.page)

    def compose(self, text: str) -> None:
        given = {"text": text, "selectionStart": len(text), "selectionEnd": len(text)}
        self._devtools.send("Input.imeSetComposition", given)

    def key(self, name: str) -> None:
        """A key that the input method takes for itself."""
        for kind in ("rawKeyDown", "keyUp"):
            given = {"type": kind, "key": name, "code": name, "windowsVirtualKeyCode": 229}
            self._devtools.send("Input.dispatchKeyEvent", given)

    def end(self, text: str) -> None:
        self._devtools.send("Input.insertText", {"text": text})


def test_words_are_composed_in_chinese_and_by_dead_keys_of_german(
    quick: RunningServer, look: Look
) -> None:
    page = with_list(opened(look, quick))
    asked = answers(page, {"content": "well"})
    method = InputMethod(page)
    page.page.focus("#text")
    for parts, word in ((("n", "ni", "ni hao"), "你好"), (("¨",), "ü"), (("^",), "ê")):
        for part in parts:
            method.compose(part)
        method.key("Enter")  # takes the word
        method.key("Escape")
        method.end(word)
    assert page.page.input_value("#text") == "你好üê"
    assert asked == []
    page.page.keyboard.press("Enter")
    page.see(".it .md", "well")
    assert asked[0]["messages"] == [{"role": "user", "content": "你好üê"}]
    # The other fields in which Enter or Escape ends something.
    page.see(".me button", "Edit").click()
    method.compose("shi")
    method.key("Escape")
    method.end("是")
    assert page.page.input_value(".editor textarea") == "你好üê是"
    page.page.keyboard.press("Escape")
    page.page.click("#chat-list .menu summary")
    page.page.click("#chat-list .menu button:text('Rename')")
    page.page.keyboard.press("End")
    method.compose("ming")
    method.key("Enter")
    method.key("Escape")
    method.end("名")
    page.page.keyboard.press("Enter")
    page.see("#chat-list .title", "你好üê名")


# ---- what is shown


def test_markdown_with_tables_lists_links_and_quotes(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    answered(page, "show all", RICH)
    cells = page.page.locator(".md td").all_text_contents()
    assert cells == ["Vasa", "1,210", "Mary | Rose", "500"]
    assert page.page.locator(".md td.to-right").count() == 2
    assert page.page.locator(".md ol > li > ul > li > ol > li").all_text_contents() == ["deepest"]
    assert page.page.locator(".md s").all_text_contents() == ["old"]
    assert page.page.locator(".md input:checked").count() == 1
    assert page.text(".md blockquote").strip() == "said <b>he</b> & she"
    links = page.page.locator(".md a").evaluate_all("all => all.map(one => one.href)")
    assert links == [
        "https://example.org/a?b=1&c=2",
        "https://example.com/",
        "https://example.org/chart.png",
    ]
    assert page.page.get_attribute(".md a", "rel") == "noopener noreferrer"
    assert "[bad](javascript:alert(1))" in page.text(".md")
    assert page.page.locator(".md img").count() == 0


def test_code_is_coloured_and_copied(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answered(page, "show all", RICH)
    page.see(".md .hl-keyword", "def")
    page.see(".md .hl-comment", "# why")
    assert page.text(".code figcaption small") == "python"
    page.see(".code button", "Copy").click()
    page.see(".code button", "Copied")
    code = 'def f(x):\n    return "text" + str(x)  # why'
    assert page.page.evaluate("() => navigator.clipboard.readText()") == code


def test_formulas_are_drawn(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    answered(page, "show all", RICH)
    page.see(".md div.math mfrac")
    assert page.page.locator(".md math").count() == 2
    assert page.page.get_attribute(".md span.math math", "aria-label") == "e^{i\\pi}+1=0"
    assert "costs $5 and $6" in page.text(".md")


def test_reasoning_is_folded(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    answers(page, {"reasoning_content": "let me see"}, {"content": "yes"})
    say(page, "is it?")
    page.see(".it .md", "yes")
    assert not page.page.locator(".it details > p").is_visible()
    page.see(".it summary", "Reasoning").click()
    page.see(".it details > p", "let me see")


# ---- files


def test_text_files_are_part_of_the_question(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    # What browsers take TypeScript for.
    file = {"name": "main.ts", "mimeType": "video/mp2t", "buffer": b"print('``` hello')"}
    page.page.set_input_files("#files", file)
    page.see("#shots .chip", "main.ts")
    asked = answered(page, "what is this?", "code")[0]
    content = "main.ts:\n````\nprint('``` hello')\n````\n\nwhat is this?"
    assert asked["messages"] == [{"role": "user", "content": content}]
    page.see(".me .chip", "main.ts")


def test_a_long_text_that_is_pasted_becomes_a_file(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.page.focus("#text")
    for num_words in (400, 500):  # of five characters
        page.page.evaluate("(text) => navigator.clipboard.writeText(text)", "word " * num_words)
        page.page.keyboard.press("Control+v")
    page.page.evaluate("() => navigator.clipboard.writeText('and so on '.repeat(300))")
    page.page.keyboard.press("Control+v")
    page.see("#shots .chip", "pasted.txt3,000 characters")
    assert len(page.page.input_value("#text")) == 900 * 5


def test_the_text_of_a_pdf_is_part_of_the_question(
    quick: RunningServer, look: Look, tmp_path: Path
) -> None:
    page = opened(look, quick)
    file = tmp_path / "tides.pdf"
    other = page.page.context.new_page()
    other.set_content(
        "<h1>Tides &amp; Tea</h1><p>High water is at <i>six</i>.</p><p>Größe: 12 m</p>"
    )
    other.pdf(path=file)
    other.close()
    page.page.set_input_files("#files", file)
    page.see("#shots .chip", "tides.pdf")
    asked = answered(page, "when?", "at six")[0]
    text = asked["messages"][0]["content"]
    for words in ("Tides & Tea", "High water is at six.", "Größe: 12 m", "when?"):
        assert words in text


def test_pictures_and_sounds_are_sent_to_a_model_that_takes_them(
    quick: RunningServer, look: Look, tmp_path: Path
) -> None:
    page = opened(look, quick)
    takes(page, ["image", "audio", "video"])
    picture = tmp_path / "dot.png"
    picture.write_bytes(DOT)
    sound = tmp_path / "beep.wav"
    sound.write_bytes(b"RIFF")
    video = tmp_path / "film.mp4"
    video.write_bytes(b"ftyp")
    page.page.set_input_files("#files", [picture, sound, video])
    page.see("#shots .chip", "film.mp4")
    page.see("#shots img")
    asked = answered(page, "what is it?", "a dot")[0]
    parts = asked["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "input_audio", "video_url", "text"]
    assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert parts[1]["input_audio"] == {"data": "UklGRg==", "format": "wav"}
    assert parts[2]["video_url"] == {"url": "data:video/mp4;base64,ZnR5cA=="}


DOT = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154"
    "789c63f8cfc0f01f00050001ffa5f6c5300000000049454e44ae426082"
)
TAKES = """async (takes) => {
  const writer = await import("./page/chat/writer.js");
  writer.introduce({ model: "byte", takes });
}"""


def takes(page: Watched, kinds: list[str]) -> None:
    """Let the page believe that the model takes these."""
    page.page.evaluate(TAKES, kinds)


def test_what_the_model_cannot_take_is_said_at_once(
    quick: RunningServer, look: Look, tmp_path: Path
) -> None:
    page = opened(look, quick)
    for name, content, words in (
        ("dot.png", DOT, "takes no pictures"),
        ("beep.wav", b"RIFF", "takes no sounds"),
        ("data.bin", b"\xff\xfe\x00", "is no text, picture, sound or PDF"),
        ("locked.pdf", pdf(b"", more=b"/Encrypt 5 0 R"), "the PDF is encrypted"),
        ("direct.pdf", pdf(b"", more=b"/Encrypt<</Filter/Standard>>"), "the PDF is encrypted"),
        ("empty.pdf", b"%PDF-1.4\n", "the PDF is damaged: nothing of it can be read"),
        (
            "cut.pdf",
            pdf(zlib.compress(SHOWN))[:-90],
            "the PDF is damaged: nothing of it can be read",
        ),
        ("scan.pdf", pdf(zlib.compress(b"q 10 0 0 10 0 0 cm /Im0 Do Q")), "the PDF has no text"),
        (
            "bomb.pdf",
            pdf(zlib.compress(bytes(65_000_000))),
            "larger than 64 MB when it is unpacked",
        ),
        ("huge.pdf", bytes(16_100_000), "at most 16 MB can be sent"),
    ):
        file = tmp_path / name
        file.write_bytes(content)
        page.page.set_input_files("#files", file)
        page.see("#log .err", re.compile(f"{name}.*{words}"))
    assert page.page.locator("#shots .chip").count() == 0


SHOWN = b"BT /F0 12 Tf (High water) Tj ET"


def pdf(content: bytes, filters: bytes = b"/FlateDecode", more: bytes = b"") -> bytes:
    """A PDF of one page with this content, packed already."""
    objects = (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/Contents 4 0 R>>",
        b"<</Length %d/Filter[%b]>>\nstream\n%b\nendstream" % (len(content), filters, content),
    )
    numbered = (b"%d 0 obj\n%b\nendobj\n" % pair for pair in enumerate(objects, 1))
    return b"%%PDF-1.4\n%btrailer<</Root 1 0 R%b>>\n%%%%EOF" % (b"".join(numbered), more)


def test_a_damaged_pdf_is_said_to_be_and_streams_may_be_packed_twice(
    quick: RunningServer, look: Look, tmp_path: Path
) -> None:
    page = opened(look, quick)
    packed = base64.a85encode(zlib.compress(SHOWN)) + b"~>"
    whole = pdf(packed, b"/ASCII85Decode/FlateDecode")
    file = tmp_path / "tides.pdf"
    file.write_bytes(whole)
    page.page.set_input_files("#files", file)
    page.see("#shots .chip", "10 characters")
    assert page.page.locator("#log .err").count() == 0
    file.write_bytes(whole.removesuffix(b"%%EOF"))
    page.page.set_input_files("#files", file)
    page.see("#log .err", "tides.pdf is damaged: only what can be read of it is attached")
    page.page.locator("#shots .chip", has_text="10 characters").nth(1).wait_for()


# ---- tools

WEATHER = {"name": "weather", "description": "of a town", "parameters": {"type": "object"}}


def test_calls_of_tools_are_answered_by_hand(quick: RunningServer, look: Look) -> None:
    page = opened(look, quick)
    page.page.click("#chat-more")
    page.page.fill("#tools", json.dumps([WEATHER]))
    page.page.click("#chat-more")
    asked = answers(page, call("weather", {"town": "Oslo"}), end="tool_calls")
    say(page, "the weather in Oslo?")
    page.see(".call-form pre", "Oslo")
    assert asked[0]["tools"] == [{"type": "function", "function": WEATHER}]
    asked = answers(page, {"content": "It rains."})
    page.page.fill(".call-form textarea", '{"rain": true}')
    page.page.click(".call-form .do")
    page.see(".it .md", "It rains.")
    assert asked[0]["messages"][1]["tool_calls"][0]["function"]["name"] == "weather"
    result = {
        "role": "tool",
        "content": '{"rain": true}',
        "tool_call_id": "call-1",
        "name": "weather",
    }
    assert asked[0]["messages"][2] == result


def test_tools_of_an_mcp_server_run_when_each_call_is_allowed(
    quick: RunningServer, look: Look
) -> None:
    page = opened(look, quick)
    page.outside_allowed.append(MCP_ORIGIN)
    seen = mcp(page)
    page.page.click("#chat-more")
    page.page.fill("#mcp-url", f"{MCP_ORIGIN}/mcp")
    page.page.press("#mcp-url", "Enter")
    page.see("#mcp-list li", "1 tools: add")
    page.page.click("#chat-more")
    for allowed, result in ((True, "5"), (False, "The user did not allow this call.")):
        asked = answers(page, call("add", {"a": 2, "b": 3}), end="tool_calls")
        say(page, "2 + 3?")
        page.see(".call-form", f"add of {MCP_ORIGIN}/mcp")
        assert asked[0]["tools"][0]["function"]["parameters"] == {"type": "object"}
        asked = answers(page, {"content": f"It is {allowed}."})
        page.page.click(
            f".call-form button:text-is('{'Allow this call' if allowed else 'Refuse'}')"
        )
        page.see(".it .md", f"It is {allowed}.")
        assert asked[0]["messages"][-1]["content"] == result
    assert seen == ["initialize", "notifications/initialized", "tools/list", "tools/call"]


def test_a_server_that_the_operator_did_not_name_is_not_reached(
    quick: RunningServer, look: Look
) -> None:
    page = opened(look, quick)
    page.page.click("#chat-more")
    page.page.fill("#mcp-url", "http://elsewhere.test/mcp")
    page.page.press("#mcp-url", "Enter")
    page.see("#mcp-list li", "start weft with --page-mcp-origins http://elsewhere.test")


def mcp(page: Watched) -> list[str]:
    """Answer for an MCP server. Returns the list of the methods that it was asked, which grows."""
    seen: list[str] = []
    cors = {"access-control-allow-origin": "*", "access-control-allow-headers": "*"}
    cors["access-control-expose-headers"] = "mcp-session-id"

    def answer(route: Any) -> None:
        if route.request.method == "OPTIONS":
            route.fulfill(status=204, headers=cors)
            return
        message = route.request.post_data_json
        seen.append(message["method"])
        if "id" not in message:
            route.fulfill(status=202, headers=cors)
            return
        result: dict[str, Any] = {"protocolVersion": "2025-06-18", "capabilities": {}}
        if message["method"] == "tools/list":
            result = {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]}
        elif message["method"] == "tools/call":
            given = message["params"]["arguments"]
            result = {"content": [{"type": "text", "text": str(given["a"] + given["b"])}]}
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
        headers = {**cors, "mcp-session-id": "s1"}
        if message["method"] != "tools/list":
            route.fulfill(headers=headers, content_type="application/json", body=body)
            return
        stream = (
            f'event: message\r\nid: 1\r\ndata: {{"method": "ping"}}\r\n\r\ndata: {body}\r\n\r\n'
        )
        route.fulfill(headers=headers, content_type="text/event-stream", body=stream)

    page.page.route(f"{MCP_ORIGIN}/**", answer)
    return seen


# ---- understanding


def test_an_answer_says_its_rate_its_cached_tokens_and_the_cause_and_price_of_its_first(
    quick: RunningServer, look: Look
) -> None:
    page = opened(look, quick)
    answered(page, "why?", "because", usage=USAGE)
    under = page.page.locator(".it .after").text_content() or ""
    assert "40 tokens" in under
    assert "96 of 1,300 cached" in under
    why = "1,204 prompt tokens computed, because the system block changed (1,204 tokens, 1.90 s)"
    page.see(".it .why", why)
    reload(page)
    page.see(".it .why", why)


# ---- keys


def test_keys_do_what_their_list_says(quick: RunningServer, look: Look) -> None:
    page = with_list(opened(look, quick))
    keys = page.page.keyboard
    answered(page, "the first", "one")
    page.page.evaluate("() => document.activeElement.blur()")
    keys.press("?")
    page.see("#keys dt", "Ctrl+K")
    keys.press("Escape")
    page.page.locator("#keys").wait_for(state="hidden")
    keys.press("n")
    page.see("#log .none")
    answered(page, "the second", "two")
    keys.press("Alt+ArrowDown")
    page.see(".me .said", "the first")
    page.page.evaluate("() => document.activeElement.blur()")
    answers(page, {"content": "again"})
    keys.press("r")
    page.see(".it .md", "again")
    page.page.evaluate("() => document.activeElement.blur()")
    keys.press("e")
    page.see(".editor textarea")
    keys.press("Escape")
    keys.press("/")
    assert page.page.evaluate("() => document.activeElement.id") == "text"


# ---- the table


def test_each_point_of_the_comparison_has_its_test() -> None:
    """The last column of the table names a test of this folder, or the page lacks the point."""
    part = GUIDE.read_text("utf-8").split("## Beside llama-server's page")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")][2:]
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert len(rows) >= 30
    for row in rows:
        _, _, ours, test = (cell.strip() for cell in row)
        assert ours == "no" or f"def {test.strip('`')}(" in tests, row
