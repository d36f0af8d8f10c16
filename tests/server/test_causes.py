"""Why a prompt missed the cache, over HTTP and on the command line, with a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.real_engine import RealServer, serving
from weft.cli.why import causes

NANO = Path(__file__).parents[2] / "weft" / "bundled" / "weft-nano"
RULES = "Answer in one word. Never say why. Write names in full, and dates as numbers. " * 6


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serving(NANO, kv_tokens=4096, page_size=16) as it:
        yield it


def ask(server: RealServer, rid: str, prompt: str) -> None:
    answer = server.post("/v1/completions", prompt=prompt, max_tokens=1, rid=rid)
    assert answer.status_code == 200, answer.text


def test_a_date_in_the_prompt_is_shown_with_its_price(server: RealServer) -> None:
    ask(server, "morning", f"Today is the 27th. {RULES}")
    ask(server, "evening", f"Today is the 28th. {RULES}")
    answer = server.get("/requests/evening").json()
    cause = answer["requests"][0]["cache_cause"]
    assert (cause["cause"], cause["rid"]) == ("changed", "morning")
    assert "28" in cause["ours_text"].replace(" ", "") or cause["ours_text"].startswith("8")
    assert cause["ours_text"] != cause["theirs_text"]
    assert cause["missed_tokens"] > 100
    assert cause["missed_s"] > 0
    lines = list(causes(answer))
    assert lines[0].startswith("evening (request ")
    assert lines[1].startswith("  cache: changed: its first ")
    assert any(line.startswith("  cost: ") for line in lines)
    assert lines[-1] == f"  advice: {cause['advice']}"


def test_a_prompt_that_was_found_has_no_price(server: RealServer) -> None:
    ask(server, "first", f"Once. {RULES}")
    ask(server, "second", f"Once. {RULES}")
    answer = server.get("/requests/second").json()
    cause = answer["requests"][0]["cache_cause"]
    assert (cause["cause"], cause["missed_tokens"], cause["advice"]) == ("found", 0, "")
    assert len(list(causes(answer))) == 2


def test_a_prompt_of_another_namespace_has_a_price_and_no_text_that_parts(
    server: RealServer,
) -> None:
    ask(server, "theirs", f"Salt. {RULES}")
    answer = server.post(
        "/v1/completions", prompt=f"Salt. {RULES}", max_tokens=1, rid="ours", cache_salt="x"
    )
    assert answer.status_code == 200, answer.text
    [_, cause, cost, advice] = causes(server.get("/requests/ours").json())
    assert cause.startswith("  cache: other namespace: ")
    assert cost.startswith("  cost: ")
    assert advice.startswith("  advice: use the same cache_salt")
