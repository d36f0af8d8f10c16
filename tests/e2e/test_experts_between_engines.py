"""A real server whose engines have the experts of one model between them: exactly the tokens of one
engine, also where an engine computes for one of several tokens alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.launch.tiny_model import write_uneven_experts
from weft import LLM, SamplingParams

NUM_PROMPTS = 16
NUM_TOKENS = 12
TOGETHER = ("--dp-size", "2", "--enable-dp-attention", "--load-balance-method", "round_robin")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_uneven_experts(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(4)
    return [[draw.randrange(256) for _ in range(draw.randint(2, 60))] for _ in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    llm = LLM(str(folder), dtype="float32", device="cpu", threads=1, kv_tokens=8_192)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(str(folder), "--dtype", "float32", "--device", "cpu", *TOGETHER)
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize("num_together", [1, 6])
def test_the_tokens_are_those_of_one_engine(
    server: Server, prompts: list[list[int]], expected: list[list[int]], num_together: int
) -> None:
    def answer(prompt: list[int]) -> list[int]:
        body = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        reply = server.post("/v1/completions", prompt=prompt, return_token_ids=True, **body)
        return list(reply["choices"][0]["token_ids"])

    with ThreadPoolExecutor(num_together) as clients:
        found = list(clients.map(answer, prompts))
    assert len(server.engines) == 2
    assert found == expected
    assert len({token for answer in expected for token in answer}) > 10
