from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.text.tokens import infill_tokenizer, sentencepiece_backend
from weft.text.infill import FAMILIES, find_infill
from weft.text.tokenizer import Tokenizer

PREFIX = [1, 2]
SUFFIX = [3]
MIDDLE = [4]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_each_family_are_found(family: object) -> None:
    spellings: Any = FAMILIES[0] if family is None else family
    texts = [text for text in spellings[:3] if text]
    ids = {text: 100 + place for place, text in enumerate(texts)}
    found = find_infill(ids.get, {})
    assert found is not None
    assert found.prefix == 100
    assert found.suffix == 101
    assert found.middle == (102 if len(texts) == 3 else None)
    assert set(found.stops) == set(ids.values())


def test_text_before_and_behind_the_gap_stand_behind_their_tokens() -> None:
    found = find_infill(
        {"<|fim_prefix|>": 10, "<|fim_suffix|>": 11, "<|fim_middle|>": 12, "<|file_sep|>": 13}.get,
        {},
    )
    assert found is not None
    assert found.prompt(PREFIX, SUFFIX, MIDDLE) == [10, 1, 2, 11, 3, 12, 4]
    assert found.file == 13
    assert found.stops == (10, 11, 12, 13)


def test_a_model_without_a_token_for_the_middle_goes_on_behind_the_prefix() -> None:
    found = find_infill({"[PREFIX]": 10, "[SUFFIX]": 11}.get, {})
    assert found is not None
    assert found.prompt(PREFIX, SUFFIX, MIDDLE) == [11, 3, 10, 1, 2, 4]


def test_names_of_the_configuration_go_before_spellings() -> None:
    ids = {"A": 1, "B": 2, "C": 3, "D": 4, "[PREFIX]": 10, "[SUFFIX]": 11}
    names = {"prefix_token": "A", "suffix_token": "B", "middle_token": "C", "eot_token": "D"}
    found = find_infill(ids.get, names)
    assert found is not None
    assert found.prefix == 1
    assert found.suffix == 2
    assert found.middle == 3
    assert found.stops == (1, 2, 3, 4)


@pytest.mark.parametrize("ids", [{}, {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2}, {"[PREFIX]": 1}])
def test_a_model_without_all_tokens_cannot_fill_in(ids: dict[str, int]) -> None:
    assert (
        find_infill(ids.get, {"prefix_token": "<none>", "suffix_token": "b", "middle_token": "c"})
        is None
    )


def test_a_text_within_another_gets_no_space_before_it() -> None:
    tokenizer = Tokenizer(sentencepiece_backend(["▁", "a", "b"]))
    space = 257
    a = 258
    b = 259
    assert tokenizer.encode("ab", add_special_tokens=False) == [space, a, b]
    assert asyncio.run(tokenizer.encode_within(["ab", " b", ""])) == [[a, b], [space, b], []]
    plain = infill_tokenizer()
    assert asyncio.run(plain.encode_within(["ab", ""])) == [list(b"ab"), []]
