"""Many requests that share a long prefix: the engine computes it once, and the others find it in the cache."""

import asyncio
import os

from openai import AsyncOpenAI

URL = os.environ.get("WEFT_URL", "http://127.0.0.1:30000")
PREFIX = "The standard library of Python has many modules. " * 20
MODULES = ["os", "re", "sys", "json", "math", "time", "enum", "heapq"]


async def describe(client: AsyncOpenAI, module: str) -> tuple[str, int, int]:
    """The text, the tokens of its prompt, and how many of these came from the cache."""
    answer = await client.completions.create(
        model="default",
        prompt=f"{PREFIX}The module {module} is",
        max_tokens=16,
        temperature=0.0,
    )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    cached = details.cached_tokens if details is not None else 0
    return answer.choices[0].text, answer.usage.prompt_tokens, cached or 0


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("WEFT_API_KEY", "none"))
    answers = await asyncio.gather(*(describe(client, module) for module in MODULES))
    for module, (text, prompt_len, cached) in zip(MODULES, answers, strict=True):
        print(f"{module:6} {cached:4} of {prompt_len} prompt tokens from the cache: {text!r}")


if __name__ == "__main__":
    asyncio.run(main())
