"""A client of an engine that tests play."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np

from tests.client.completions import make_request
from tests.text.tokens import byte_tokenizer
from weft.client.client import EngineClient
from weft.client.generation import Delta, Generation
from weft.messages.codec import ToEngine
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.messages.status import EngineReady

READY = EngineReady(
    model_summary="x",
    vocab_size=300,
    context_length=100,
    max_prompt_tokens=90,
    kv_tokens=900,
    page_size=1,
    startup=[],
)


class World:
    """A client whose engine is the test itself."""

    def __init__(self, **options: Any) -> None:
        self.sent: list[ToEngine] = []
        self.client = EngineClient(byte_tokenizer(), self.sent.append, **options)
        self.client.deliver(READY)

    def submit(
        self, text: str = "hi", *, stream: bool = True, rid: str = "r", **params: Any
    ) -> Generation:
        prompt = make_request(list(text.encode()), SamplingParams(**params), rid=rid)
        return self.client.submit([prompt], stream=stream)

    @property
    def requests(self) -> list[GenerateRequest]:
        """Alone, and in batches."""
        found: list[GenerateRequest] = []
        for message in self.sent:
            if isinstance(message, BatchGenerate):
                found += message.members()
            elif isinstance(message, GenerateRequest):
                found.append(message)
        return found

    @property
    def aborts(self) -> list[Abort]:
        return [message for message in self.sent if isinstance(message, Abort)]

    def step(
        self, *tokens: tuple[int, int], finished: list[Finish] | None = None, **fields: Any
    ) -> None:
        self.client.deliver(
            StepOutput(
                ids=np.asarray([id for id, _ in tokens], dtype=np.int64).tobytes(),
                tokens=np.asarray([token for _, token in tokens], dtype=np.int32).tobytes(),
                finished=finished or [],
                **fields,
            )
        )

    def say(self, id: int, text: str | bytes) -> None:
        """One step that brings all bytes of `text`."""
        raw = text.encode() if isinstance(text, str) else text
        self.step(*((id, byte) for byte in raw))


def texts(deltas: list[Delta]) -> list[str]:
    return [delta.text for delta in deltas]


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 240))
