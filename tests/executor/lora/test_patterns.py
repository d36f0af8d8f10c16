"""Patterns of an adapter's modules: they choose as `re` chooses, and no pattern takes long."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft.config.automaton import BadPattern
from weft.executor.lora import patterns as ours
from weft.executor.lora.patterns import MAX_EDGES, ModulePatterns

MODULES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.10.self_attn.q_proj",
    "model.layers.1.mlp.up_proj",
    "model.embed_tokens",
    "lm_head",
)
ATOMS = (
    *("q_proj", "layers", "up", "model", "1", "0", "a", r"\.", ".", r"\d", "[a-z_]", r"\w", "_"),
    *("(?:q|up)_proj", "(a|)", "(?i:Q)", "^", "$", r"\b", "(?:[a-z]+)"),
)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    repeats = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "*?"])
    parts = draw(st.lists(st.tuples(st.sampled_from(ATOMS), repeats), min_size=1, max_size=5))
    fixed = ("^", "$", r"\b")
    return "".join(atom + ("" if atom in fixed else repeat) for atom, repeat in parts)


def by_re(given: dict[str, Any], module: str) -> Any:
    """The specification: what peft does."""
    for key, value in given.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return None


@example(keys=[r"\bq_proj", "^.*"])  # two conditions at once
@given(keys=st.lists(patterns(), min_size=1, max_size=4, unique=True))
@settings(max_examples=60, deadline=None)
def test_the_first_pattern_that_matches_decides(keys: list[str]) -> None:
    given = {key: place for place, key in enumerate(keys)}
    found = ModulePatterns(given)
    for module in MODULES:
        assert found.value(module, None) == by_re(given, module), (keys, module)


@pytest.mark.parametrize(
    "key",
    [
        *MODULES,
        *("^model.layers.1.self_attn.q_proj", "^q_proj", "proj", "layers.1.self_attn.q.proj"),
        *("layers.1..self_attn.q_proj", r"layers\.(0|1)\..*_proj", ".*", "lm_hea.", ""),
    ],
)
def test_names_match_as_expressions(key: str) -> None:
    for module in MODULES:
        assert ModulePatterns({key: 1}).value(module, None) == by_re({key: 1}, module)


EVIL = (
    "^(([a-z._0-9])+)+$X",
    "(a|a)*X",
    "((((((.*)*)*)*)*)*)*X",
    "(.|..|...)+(.|..|...)+(.|..|...)+X",
    "(?:[a-z_.0-9]{1,40}){1,40}X",
)


@pytest.fixture
def max_steps(monkeypatch: pytest.MonkeyPatch) -> int:
    """Fewer than those that serve, which take seconds."""
    monkeypatch.setattr(ours, "MAX_STEPS", ours.MAX_STEPS // 10)
    return ours.MAX_STEPS


@pytest.mark.parametrize("key", EVIL)
def test_no_pattern_takes_more_than_its_steps(key: str, max_steps: int) -> None:
    module = "model.layers.0." + "a" * 200
    found = ModulePatterns({key: 1})
    with suppress(BadPattern):
        for number in range(30):
            assert found.value(f"{module}.{number}", None) is None
    assert found._steps <= max_steps + MAX_EDGES


def value_of_many(found: ModulePatterns) -> None:
    for number in range(100):
        found.value(f"model.layers.{number}." + "1234567890" * 20, None)


def test_the_patterns_of_a_setting_share_one_limit(max_steps: int) -> None:
    found = ModulePatterns({rf"(?:.*{number}.*)+X": 1 for number in range(300)})
    with pytest.raises(BadPattern, match=f"more than {max_steps:,} steps"):
        value_of_many(found)


def test_thousands_of_names_are_looked_up() -> None:
    names = [f"model.layers.{layer}.experts.{one}.up" for layer in range(50) for one in range(100)]
    found = ModulePatterns({name: place for place, name in enumerate(names)})
    assert [found.value(name, None) for name in names] == list(range(len(names)))
    assert found._steps == 0


@pytest.mark.parametrize(
    "key", ["(", "(?=a)b", r"(a)\1", "(?P<a>x)(?P=a)", "a{9999999}", "(" * 250]
)
def test_what_cannot_be_matched_in_linear_time_is_refused(key: str) -> None:
    with pytest.raises(BadPattern):
        ModulePatterns({key: 1})
