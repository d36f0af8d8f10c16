"""instructor against a real server: objects in each of its ways to ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.clients.shared import HI, KEY, MODEL, Api

instructor = pytest.importorskip("instructor")
pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
MODES = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"]


class Weather(BaseModel):
    model_config = ConfigDict(
        extra="forbid"
    )  # else a model may add what it likes, and this one does

    city: Literal["Oslo", "Rome"]
    warm: bool


@pytest.fixture
def sdk(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=api.v1, api_key=KEY, max_retries=0, timeout=240) as client:
        yield client


@pytest.mark.parametrize("mode", MODES)
def test_an_object_comes_back(sdk: openai.OpenAI, mode: str) -> None:
    client = instructor.from_openai(sdk, mode=instructor.Mode[mode])
    limit = (
        {"max_output_tokens": 300, "temperature": 0}
        if mode.startswith("RESPONSES")
        else {"max_tokens": 300, "temperature": 0}
    )
    found = client.chat.completions.create(
        model=MODEL, messages=HI, response_model=Weather, max_retries=0, **limit
    )
    assert isinstance(found, Weather)


def test_modes_that_ask_for_any_json_are_held_to_it_by_a_schema(sdk: openai.OpenAI) -> None:
    held: Any = {"extra_body": {"guided_json": Weather.model_json_schema()}}
    client = instructor.from_openai(sdk, mode=instructor.Mode.MD_JSON)
    found = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        response_model=Weather,
        max_retries=0,
        max_tokens=300,
        temperature=0,
        **held,
    )
    assert isinstance(found, Weather)


def test_an_object_grows_in_a_stream(sdk: openai.OpenAI) -> None:
    client = instructor.from_openai(sdk, mode=instructor.Mode.TOOLS)
    parts = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=HI, response_model=Weather, max_tokens=300, temperature=0
        )
    )
    assert parts[-1].city in ("Oslo", "Rome")


def test_an_asynchronous_client_gets_objects(api: Api) -> None:
    async def several() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=api.v1, api_key=KEY, timeout=240) as sdk:
            client = instructor.from_openai(sdk, mode=instructor.Mode.JSON_SCHEMA)
            create = client.chat.completions.create
            return await asyncio.gather(
                *(
                    create(
                        model=MODEL,
                        messages=HI,
                        response_model=Weather,
                        max_tokens=300,
                        temperature=0,
                    )
                    for _ in range(4)
                )
            )

    assert all(isinstance(one, Weather) for one in asyncio.run(several()))
