"""Input embeddings and hidden states of the bundled model, through tokenizer, scheduler and
kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file

import weft
from weft import LLM, SamplingParams
from weft.messages.requests import GenerateRequest
from weft.scheduler.request import RequestState

FOLDER = Path(weft.__file__).parent / "bundled" / "weft-nano"
TEXTS = [
    "Once upon a time there was a small town by the sea, and in it lived a",
    "Once upon a time there was a small town by the sea, and nobody",
    "The three most important things about computers are",
]


@pytest.fixture(scope="module", params=["auto", "int8", "torch"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """By our kernels, by those for weights of 8 bits, and by torch."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "page_size": 8,
        "chunked_prefill_size": 8,
        "mixed_chunk": True,
    }
    match request.param:
        case "int8":
            settings["quantize"] = "int8"
        case kernels:
            settings["kernels"] = kernels
    llm = LLM(
        threads=1, kv_tokens=2_000, context_length=128, enable_return_hidden_states=True, **settings
    )
    take_back_often(llm)
    with llm:
        yield llm


def take_back_often(llm: LLM) -> None:
    """From now on requests that decode are taken back at every ninth step, as if memory were
    short."""
    engine: Any = llm._own.engine
    step = engine.step
    count = itertools.count(1)

    def shaken() -> Any:
        decoding = [
            one for one in engine.scheduler.requests.values() if one.state is RequestState.DECODING
        ]
        if next(count) % 9 == 0:
            for request in decoding:
                engine.scheduler.retract(request)
        return step()

    engine.step = shaken


@pytest.fixture(scope="module")
def rows() -> Callable[[list[int]], NDArray[np.float32]]:
    """Of the model's embedding."""
    table = load_file(FOLDER / "model.safetensors")["model.embed_tokens.weight"].float()
    return lambda ids: table[ids].numpy()


def greedy(max_new_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True, **more)


def num_retractions(llm: LLM) -> int:
    return int(llm._own.engine.scheduler.counters.num_retractions)  # type: ignore[attr-defined]


def test_own_embedding_rows_as_input_give_the_tokens_of_the_ids(
    llm: LLM, rows: Callable[[list[int]], NDArray[np.float32]]
) -> None:
    """In chunks, mixed with requests that come with ids, and while all of them are taken back."""
    ids = [llm.tokenizer.encode(text) for text in TEXTS[:2]]
    alone = [llm.generate(one, greedy())[0].token_ids for one in ids]
    if llm.config.quantize == "int8":  # the rows that this model has
        table = llm._own.engine.surroundings.runner.steps._model._model.embedding.matrix.get(0)  # type: ignore[attr-defined]
        vectors = [table[one].numpy() for one in ids]
    else:
        vectors = [rows(one) for one in ids]
    before = num_retractions(llm)
    prompts = [*vectors, ids[1], vectors[0]]
    outputs = llm.generate(prompts, greedy())
    assert [output.token_ids for output in outputs] == [*alone, alone[1], alone[0]]
    assert num_retractions(llm) > before
    assert [output.cached_tokens for output in outputs if output is not outputs[2]] == [0] * 3
    assert llm.generate([0] * len(ids[0]), greedy(1))[0].cached_tokens == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, 3.4e38])  # the last is infinite in bfloat16
def test_vectors_that_are_not_finite_end_their_own_request(llm: LLM, value: float) -> None:
    if llm.config.kernels == "torch" and value == 3.4e38:
        pytest.skip("in float32 torch's norm makes a row of zeros of it")
    [expected] = llm.generate([TEXTS[2]], greedy(12))
    vectors = np.full((9, llm._own.facts.hidden_size), value, dtype=np.float32).tobytes()
    poisoned = GenerateRequest(
        rid="poisoned", input_ids=bytes(4 * 9), sampling=greedy(12), vectors=vectors
    )
    outputs = dict(llm.complete([poisoned, llm.prompt(TEXTS[2], greedy(12)), poisoned]))
    assert [outputs[i][0].finish_reason for i in range(3)] == ["error", "length", "error"]
    assert "not finite" in outputs[0][0].error
    assert outputs[1][0].token_ids == expected.token_ids
    assert llm.generate([TEXTS[2]], greedy(12))[0].token_ids == expected.token_ids


def test_hidden_states_are_those_of_transformers_whatever_is_cached_or_taken_back(llm: LLM) -> None:
    if llm.config.quantize == "int8":
        pytest.skip("other weights")
    model = transformers.AutoModel.from_pretrained(FOLDER, dtype=torch.float32)
    llm.generate(TEXTS, greedy(4))  # their beginnings are cached
    before = num_retractions(llm)
    outputs = llm.generate(TEXTS, greedy(12, hidden_states="all", n=2))
    assert num_retractions(llm) > before
    for text, output in zip([text for text in TEXTS for _ in range(2)], outputs, strict=True):
        whole = llm.tokenizer.encode(text) + output.token_ids
        with torch.inference_mode():
            expected = model(torch.tensor([whole])).last_hidden_state[0, :-1].numpy()
        assert output.hidden_states is not None
        assert np.abs(output.hidden_states - expected).max() < 2e-4 * np.abs(expected).max()
    [last] = llm.generate(TEXTS[2], greedy(3, hidden_states="last"))
    assert last.hidden_states is not None
    whole_states = outputs[4].hidden_states
    assert whole_states is not None
    place = len(llm.tokenizer.encode(TEXTS[2])) + 1
    assert np.allclose(last.hidden_states, whole_states[place : place + 1], atol=1e-3)
    assert last.cached_tokens
