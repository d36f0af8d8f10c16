"""Why prompts missed the caches of real engines: of several that serve together, and of one whose
memory is short."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.server.real_engine import MACHINE, serving
from weft.assemble.build import Built, build_engine
from weft.assemble.prepare import load_tokenizer, prepare
from weft.client.client import EngineClient
from weft.client.engine_state import HangDetector
from weft.client.explained import OTHER_ENGINE, explained
from weft.client.fleet.fleet import Fleet
from weft.client.fleet.member import Member
from weft.client.requests import pack_ids
from weft.config.engine import EngineConfig
from weft.messages.codec import ToEngine
from weft.messages.control import Explanation
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.observe.metrics import Metrics
from weft.route.policy import EngineRouter

NANO = Path(__file__).parents[2] / "weft" / "bundled" / "weft-nano"
NUM_ENGINES = 2
PAGE = 16
PROMPT = list(range(100, 180))


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Built]]:
    config = EngineConfig(model=str(NANO), device="cpu", threads=1, kv_tokens=2_048, page_size=PAGE)
    prepared = prepare(config, MACHINE)
    with contextlib.ExitStack() as ends:
        found = []
        for _ in range(NUM_ENGINES):
            found.append(build_engine(prepared.config, prepared.folder))
            ends.callback(found[-1].runner.close)
        yield found


class ServedTogether:
    """A client of engines that take turns with requests, all of it in one event loop."""

    def __init__(self, engines: list[Built]) -> None:
        self._engines = engines
        metrics = Metrics()
        numbers = metrics.engine
        members = [Member(rank, numbers, HangDetector()) for rank in range(len(engines))]
        self.fleet = Fleet(members, EngineRouter("round_robin", len(engines), 2_048))
        self.client = EngineClient(load_tokenizer(NANO), self.fleet.send, metrics=metrics)
        self.client.engines = members
        for rank, built in enumerate(engines):
            members[rank].attach(partial(self._send, rank))
            self.fleet.take(rank, built.ready)

    def _send(self, rank: int, message: ToEngine) -> None:
        reply = self._engines[rank].engine.submit(message)
        if reply is not None:
            self.fleet.take(rank, reply)

    async def ask(self, rid: str, prompt: list[int], tenant: str) -> None:
        vocab_size = self.client.engine.vocab_size
        request = GenerateRequest(
            rid=rid,
            input_ids=pack_ids(prompt, vocab_size),
            sampling=SamplingParams(max_new_tokens=2, ignore_eos=True),
            tenant=tenant,
        )
        with self.client.submit([request], stream=False) as generation:
            while not generation.ended:
                for rank, built in enumerate(self._engines):
                    for reply in built.engine.step():
                        self.fleet.take(rank, reply)
                await asyncio.sleep(0)


async def told(engines: list[Built], viewer: str | None) -> Explanation:
    """Why a prompt missed that another engine had computed for another tenant."""
    together = ServedTogether(engines)
    work = asyncio.create_task(together.client.run(together.fleet.receive))
    await asyncio.sleep(0)
    await together.ask(f"first {viewer}", PROMPT, "ann")
    await together.ask(f"second {viewer}", [*PROMPT[:70], 7, 8], "bob")
    (one,) = await explained(together.client, f"second {viewer}", viewer=viewer)
    work.cancel()
    for built in engines:
        built.engine.start_over()
    return one


@pytest.mark.parametrize(
    ("viewer", "rid", "same_tokens"),
    [(None, "first None", 70), ("ann", "first ann", 70), ("bob", "", 64)],
)
def test_a_prompt_that_another_real_engine_has_computed_went_to_the_wrong_one(
    engines: list[Built], viewer: str | None, rid: str, same_tokens: int
) -> None:
    one = asyncio.run(told(engines, viewer))
    cause = one.cache_cause
    assert cause is not None
    assert (cause.cause, cause.rid, cause.same_tokens) == (OTHER_ENGINE, rid, same_tokens)
    assert (one.cached_tokens, cause.missed_tokens) == (0, 64)
    assert cause.theirs == []
    assert one.times[-1].part == "sending"
    assert sum(part.seconds for part in one.times) == pytest.approx(one.total_s)


def test_what_gave_way_in_a_real_engine_is_named() -> None:
    with serving(NANO, kv_tokens=512, page_size=PAGE) as server:

        def ask(rid: str, ids: list[int]) -> Any:
            answer = server.post("/v1/completions", prompt=ids, max_tokens=1, rid=rid)
            assert answer.status_code == 200, answer.text
            (one,) = server.get(f"/requests/{rid}").json()["requests"]
            return one

        long = list(range(100, 420))
        ask("before", long)
        ask("others", list(range(1_000, 1_400)))
        one = ask("again", long)
        cause = one["cache_cause"]
        assert (cause["cause"], cause["rid"]) == ("evicted", "before")
        assert cause["missed_tokens"] == 304 - one["cached_tokens"] > 0
