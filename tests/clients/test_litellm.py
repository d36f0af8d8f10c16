"""LiteLLM against a real server, as it speaks to OpenAI, to Anthropic, to a vLLM and to Ollama."""

from __future__ import annotations

import asyncio
import json
import os
from copy import deepcopy
from typing import Any

import pytest

from tests.clients.shared import HI, KEY, MODEL, TOOLS, Api

os.environ.setdefault(
    "LITELLM_LOCAL_MODEL_COST_MAP", "True"
)  # else it asks the network when it is imported
litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
PROVIDERS = ["openai", "hosted_vllm", "anthropic", "ollama_chat", "text-completion-openai"]


def options(api: Api, provider: str) -> dict[str, Any]:
    base = api.url if provider in ("anthropic", "ollama_chat") else api.v1
    return {
        "model": f"{provider}/{MODEL}",
        "api_base": base,
        "api_key": KEY,
        "messages": HI,
        "max_tokens": 16,
    }


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_way_of_speaking_is_answered_whole_and_as_a_stream(api: Api, provider: str) -> None:
    asked = options(api, provider)
    answer = litellm.completion(**asked, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 16
    chunks = list(litellm.completion(**asked, temperature=0, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.strip() == answer.choices[0].message.content.strip()


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_a_forced_tool_is_called(api: Api, provider: str) -> None:
    asked = {
        **options(api, provider),
        "max_tokens": 300,
        "temperature": 0,
        "tools": deepcopy(TOOLS[:1]),
    }  # it changes them
    [call] = (
        litellm.completion(**asked, tool_choice="required", parallel_tool_calls=False)
        .choices[0]
        .message.tool_calls
    )
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_mistakes_have_the_exceptions_of_the_library(api: Api) -> None:
    asked = {**options(api, "openai"), "num_retries": 0}
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**asked, "api_key": "no"})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "openai/other"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "max_tokens": 5_000})


def test_it_is_asynchronous_as_well(api: Api) -> None:
    async def several() -> list[Any]:
        return await asyncio.gather(
            *(litellm.acompletion(**options(api, "openai")) for _ in range(8))
        )

    assert all(answer.choices[0].message.content for answer in asyncio.run(several()))
