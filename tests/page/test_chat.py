"""The chat of the live page, with a real server: ask, stop, go wrong, and text that stays text."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.e2e.server import Server, wait_until
from tests.page.conftest import Look
from tests.page.talk import answers, refused, reload, say

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)> [x](javascript:alert(3)) "
    "**<b>bold</b>** `</code><svg onload=alert(4)>`"
)


def test_an_answer_streams_in_and_the_request_has_a_story(server: Server, look: Look) -> None:
    page = look(server.url).live()
    page.page.fill("#text", "what does os.path.join do?")
    page.page.press("#text", "Enter")
    page.see(".it .after", "tokens")
    assert len(page.text(".it")) > 20
    page.see(".after button", "Story").click()
    story = page.see("#story .times li", "finished")
    assert "tokens" in str(story.text_content())
    rid = page.text("#story .rid")
    assert rid.startswith("page-")
    assert server.get(f"/requests/{rid}")["requests"][0]["state"] == "finished"
    page.page.keyboard.press("Escape")
    page.page.locator("#story").wait_for(state="hidden")


def test_a_second_question_goes_on_from_the_first(server: Server, look: Look) -> None:
    page = look(server.url).live()
    for number in (1, 2):
        page.page.fill("#text", "hello")
        page.page.click("#send")
        page.page.locator(".it .after").nth(number - 1).wait_for()
    page.see(".it:nth-of-type(4) .after, .it .after", "cached")


def test_an_answer_says_why_its_prompt_was_computed_and_where_its_time_went(
    server: Server, look: Look
) -> None:
    page = look(server.url).live()
    page.page.fill("#text", "why is this one computed?")
    page.page.press("#text", "Enter")
    page.see(".it .why", "prompt tokens computed, because")
    page.see(".after button", "Story").click()
    page.see("#story .parts li", "prefill")
    page.see("#story .parts li", "decode")
    page.see("#story .facts", "cache:")


def test_an_answer_shows_its_place_in_the_steps(server: Server, look: Look) -> None:
    page = look(server.url).live()
    page.page.click("#tab-chat")
    say(page, "where were you?")
    page.see(".it .after", "tokens")
    page.see(".after button", "Steps").click()
    page.see("#steps-text", re.compile(r"the marked request: steps [\d,]+ to [\d,]+"))
    assert page.page.get_attribute("#tab-both", "aria-pressed") == "true"


def test_an_answer_of_reasoning_alone_is_over_when_it_ends(server: Server, look: Look) -> None:
    page = look(server.url).live()
    body = f"data: {json.dumps({'choices': [{'delta': {'reasoning_content': 'hm'}}]})}\n\ndata: [DONE]\n\n"
    page.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
    page.page.fill("#text", "well?")
    page.page.press("#text", "Enter")
    page.see(".it .after")
    assert page.text(".it summary") == "Reasoning"


def test_stop_ends_the_request_in_the_engine(server: Server, look: Look) -> None:
    page = look(server.url).live()

    def without_end(route: Any) -> None:
        body = {**route.request.post_data_json, "ignore_eos": True}
        route.continue_(post_data=json.dumps(body))

    page.page.route("**/v1/chat/completions", without_end)
    page.page.click("#chat-more")
    page.page.fill("#max-tokens", "1500")
    with server.slowed():
        page.page.fill("#text", "count to a thousand")
        page.page.press("#text", "Enter")
        page.see(".it.busy .md p")
        page.see(".lane.mine")
        page.page.click("#stop")
        page.see(".it .after", "stopped")
    assert wait_until(lambda: server.load()["num_running_reqs"] == 0)


def test_what_goes_wrong_is_said(server: Server, look: Look) -> None:
    page = look(server.url).live()
    page.expected.append("400")
    page.page.click("#chat-more")
    page.page.fill("#max-tokens", "99999999")
    page.page.fill("#text", "hello")
    page.page.press("#text", "Enter")
    page.see(".it.bad .err", "max_tokens is 99,999,999")
    page.page.fill("#schema", "{nonsense")
    page.page.fill("#text", "hello again")
    page.page.press("#text", "Enter")
    page.see(".err", "the JSON schema is not JSON")
    assert page.page.input_value("#text") == "hello again"


def test_an_answer_keeps_to_a_json_schema(server: Server, look: Look) -> None:
    page = look(server.url).live()
    page.page.click("#chat-more")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    page.page.fill("#schema", json.dumps({**schema, "additionalProperties": False}))
    page.page.fill("#text", "is it so?")
    page.page.press("#text", "Enter")
    page.see(".it .after", "tokens")
    assert json.loads(page.text(".it .md p"))["ok"] in (True, False)


def test_hostile_answers_prompts_and_names_stay_text(server: Server, look: Look) -> None:
    page = look(server.url).live()
    delta = {
        "reasoning_content": HOSTILE,
        "content": f"{HOSTILE}\n```\n{HOSTILE}\n```\n- {HOSTILE}",
    }
    body = f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\ndata: [DONE]\n\n"
    page.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
    page.page.fill("#text", HOSTILE)
    page.page.press("#text", "Enter")
    page.see(".it .after")
    assert "<script>alert(1)</script>" in page.text(".it pre")
    assert page.text(".me .said") == HOSTILE
    page.see(".it summary", "Reasoning").click()
    assert HOSTILE in page.text(".it details")
    inside = page.page.locator("#log script, #log img, #log svg, #log a, #log b b")
    assert inside.count() == 0
    # In the engine, too: the tree shows what was asked.
    page.page.unroute("**/v1/chat/completions")
    server.post("/v1/completions", prompt=HOSTILE * 3, max_tokens=1)
    page.see("#tree button", "<script>")
    assert page.page.locator("#tree script, #tree img").count() == 0


def test_a_cut_answer_says_so(server: Server, look: Look) -> None:
    page = look(server.url).live()
    answers(page, {"content": "half a sen"}, end="length")
    say(page, "well?")
    page.see(".it .after", "cut at the largest number of tokens")


def test_what_could_not_be_sent_is_there_to_be_sent_again(server: Server, look: Look) -> None:
    page = look(server.url).live()
    page.expected.append("503")
    refused(page, 503, "too many requests wait")
    say(page, "a long question")
    page.see(".it .err", "too many requests wait")
    reload(page)
    page.see(".me .said", "a long question")
    page.see(".it .err", "too many requests wait")
    page.page.unroute("**/v1/chat/completions")
    answers(page, {"content": "now"})
    page.see(".it button", "Try again").click()
    page.see(".it .md", "now")
    assert page.page.locator(".it").count() == 1
