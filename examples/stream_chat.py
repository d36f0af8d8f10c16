"""A streamed chat through the `openai` package."""

import os

from openai import OpenAI

URL = os.environ.get("WEFT_URL", "http://127.0.0.1:30000")


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("WEFT_API_KEY", "none"))
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "What does os.path.join do?"}],
        max_tokens=60,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
