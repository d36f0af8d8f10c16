"""Ollama's Python client against a real server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.clients.shared import CITY_SCHEMA, HI, KEY, MODEL, TOOLS, Api

ollama = pytest.importorskip("ollama")
pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
GREEDY = {"temperature": 0, "num_predict": 16}


@pytest.fixture
def client(api: Api) -> Any:
    return ollama.Client(host=api.url, headers={"Authorization": f"Bearer {KEY}"})


def test_it_chats_and_generates_whole_and_in_pieces(client: Any) -> None:
    whole = client.chat(model=MODEL, messages=HI, options=GREEDY)
    assert whole.done_reason == "length"
    assert whole.eval_count == 16
    pieces = client.chat(model=MODEL, messages=HI, options=GREEDY, stream=True)
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    text = client.generate(model=MODEL, prompt="Once", raw=True, options=GREEDY)
    parts = list(client.generate(model=MODEL, prompt="Once", raw=True, options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == text.response
    assert parts[-1].done


def test_a_format_is_a_constraint_and_tools_may_be_offered(client: Any) -> None:
    answer = client.chat(model=MODEL, messages=HI, format=CITY_SCHEMA)
    assert json.loads(answer.message.content)["city"] in ("Oslo", "Rome")
    offered = client.chat(model=MODEL, messages=HI, tools=TOOLS, options=GREEDY)
    assert offered.message.content or offered.message.tool_calls


def test_the_model_is_listed_and_described(client: Any) -> None:
    assert [one.model for one in client.list().models] == [MODEL]
    assert [one.model for one in client.ps().models] == [MODEL]
    assert "completion" in client.show(MODEL).capabilities


def test_mistakes_are_errors_with_a_status(api: Api, client: Any) -> None:
    for other, asked, status in (
        (ollama.Client(host=api.url), {"model": MODEL}, 401),
        (client, {"model": "other"}, 404),
        (client, {"model": MODEL, "options": {"temperature": 9}}, 400),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            other.chat(messages=HI, **asked)
        assert caught.value.status_code == status


def test_it_is_asynchronous_as_well(api: Api) -> None:
    async def several() -> list[Any]:
        client = ollama.AsyncClient(host=api.url, headers={"Authorization": f"Bearer {KEY}"})
        return await asyncio.gather(
            *(client.chat(model=MODEL, messages=HI, options=GREEDY) for _ in range(8))
        )

    assert len({answer.message.content for answer in asyncio.run(several())}) == 1
