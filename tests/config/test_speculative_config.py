"""What other engines call drafts means the same here, or is refused by name."""

from __future__ import annotations

import pytest

from weft.config.drafts import parse_draft_sources
from weft.config.engine import EngineConfig
from weft.config.options import Command, SettingsError
from weft.config.speculative_config import with_speculative_config
from weft.memory.radix.cache import RadixCache
from weft.scheduler.speculation.sources import Repetition, make_sources


def read(text: str, **given: object) -> EngineConfig:
    return with_speculative_config(EngineConfig(speculative_config=text, **given))  # type: ignore[arg-type]


def test_ngram_as_vllm_writes_it() -> None:
    config = read(
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6, "prompt_lookup_min": 3}'
    )
    assert (config.speculative, config.max_draft) == ("ngram", 5)
    assert (config.ngram_max, config.ngram_min) == (6, 3)
    assert config.speculative_config == ""


@pytest.mark.parametrize("method", ["", '"method": "draft_model", ', '"method": "draft", '])
def test_a_draft_model_as_vllm_writes_it(method: str) -> None:
    config = read("{" + method + '"model": "weft-nano-draft", "num_speculative_tokens": 4}')
    assert (config.speculative, config.draft_model) == ("draft", "weft-nano-draft")
    assert config.max_draft == 4


def test_a_head_is_named_by_its_method() -> None:
    config = read('{"method": "eagle3", "model": "head", "num_speculative_tokens": 3}')
    assert (config.speculative, config.draft_model, config.max_draft) == ("eagle3", "head", 3)


def test_without_it_nothing_changes() -> None:
    config = EngineConfig(max_draft=3)
    assert with_speculative_config(config) is config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"method": "eagle", "model": "x"}', "method is 'eagle': weft computes no heads"),
        ('{"method": "medusa"}', "method is 'medusa': weft computes no heads"),
        ('{"method": "suffix"}', "method is 'suffix'; one of ngram, draft_model"),
        (
            '{"num_speculative_token": 3}',
            "has the key 'num_speculative_token'; allowed keys: .*did you mean",
        ),
        ('{"num_speculative_tokens": "3"}', "num_speculative_tokens is '3'; a whole number"),
        ('{"num_speculative_tokens": 1000}', "num_speculative_tokens is 1000; 1 to 64"),
        ("ngram", "is not valid JSON"),
        ("[]", "an object is expected"),
    ],
)
def test_what_it_cannot_mean_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read(text)


def test_an_option_is_not_given_twice() -> None:
    with pytest.raises(SettingsError, match="--max-draft are both given"):
        read('{"num_speculative_tokens": 5}', max_draft=3)


def test_algorithms_of_others_are_sources() -> None:
    assert parse_draft_sources("NGRAM", "--speculative") == ("ngram",)
    assert parse_draft_sources("STANDALONE", "--speculative") == ("draft",)
    assert parse_draft_sources("EAGLE3", "--speculative") == ("eagle3",)
    assert parse_draft_sources("NEXTN", "--speculative") == ("mtp",)
    for name in ("EAGLE", "MEDUSA"):
        with pytest.raises(SettingsError, match=f"--speculative is '{name}': weft computes no"):
            parse_draft_sources(name, "--speculative")


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("-md", "--draft-model"),
        ("--speculative-num-draft-tokens", "--max-draft"),
        ("--speculative-eagle-topk", "--max-draft"),
        ("--draft-min", "--max-draft"),
    ],
)
def test_options_of_others_are_refused_with_the_name_here(word: str, flag: str) -> None:
    command = Command("weft serve", "", EngineConfig, positional="model")
    with pytest.raises(SettingsError, match=f"unknown option {word}; its name in weft is {flag}$"):
        command.read([word, "4"], {})


def test_names_of_others_that_mean_the_same_are_taken() -> None:
    command = Command("weft serve", "", EngineConfig, positional="model")
    argv = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "small"]
    config = command.read([*argv, "--speculative-num-steps", "3"], {}).make(EngineConfig)
    assert (config.speculative, config.draft_model, config.max_draft) == ("STANDALONE", "small", 3)
    config = command.read(["--model-draft", "small", "--draft-max", "5"], {}).make(EngineConfig)
    assert (config.draft_model, config.max_draft) == ("small", 5)


def test_pieces_of_a_text_are_as_long_as_they_are_asked_for() -> None:
    def pieces(longest: int, shortest: int) -> list[tuple[int, int]]:
        sources = make_sources(("ngram",), RadixCache(1), longest, shortest)
        return [(one._longest, one._shortest) for one in sources if isinstance(one, Repetition)]

    assert pieces(4, 2) == [(4, 3), (2, 2)]
    assert pieces(8, 5) == [(8, 5)]
    assert pieces(2, 1) == [(2, 1)]
    assert pieces(1, 1) == [(1, 1)]
