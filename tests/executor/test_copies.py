"""K and V that are copied are those that would be computed: the same tokens and log probabilities,
bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from weft import LLM, SamplingParams

TURNS = (
    "Once upon a time there was a small town by the sea, and in it lived a",
    "Once upon a time there was a small town by the sea, and in it nobody lived, but",
    "Once upon a time there was a small town by the river, and",
)


def answers(**settings: Any) -> tuple[list[tuple[Any, ...]], int]:
    """The tokens and log probabilities of some turns, and how many tokens of prompts were found."""
    llm = LLM("weft-nano", threads=1, kv_tokens=2_000, context_length=256, page_size=16, **settings)
    found = []
    num_cached = 0
    for prompt in TURNS:
        text = prompt
        for temperature in (0.0, 0.8, 0.0):
            params = SamplingParams(
                max_new_tokens=11, temperature=temperature, seed=5, logprobs=2, ignore_eos=True
            )
            [output] = llm.generate([text], params)
            found.append((output.token_ids, output.logprobs))
            num_cached += output.cached_tokens
            text += output.text + " and then"
    return found, num_cached


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "float32"}, {"dtype": "bfloat16", "kv_dtype": "int8"}],
    ids=["float32", "KV in 8 bits"],
)
def test_copied_tokens_change_no_bit(settings: dict[str, Any]) -> None:
    with_copies, num_cached = answers(**settings)
    without, num_without = answers(page_copies=False, **settings)
    assert with_copies == without
    assert num_cached > num_without + 30


def test_copied_tokens_change_no_token_where_torch_computes() -> None:
    """Its products have other last bits for other numbers of rows."""
    settings = {"dtype": "float32", "kernels": "torch"}
    with_copies, num_cached = answers(**settings)
    without, num_without = answers(page_copies=False, **settings)
    assert [tokens for tokens, _ in with_copies] == [tokens for tokens, _ in without]
    assert num_cached > num_without + 30
