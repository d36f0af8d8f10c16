"""Structured output with the bundled model, in this process: jumps give the same tokens in fewer
steps, and a budget ends the reasoning before a grammar."""

from __future__ import annotations

import json
import re

from weft import LLM, Grammar, SamplingParams
from weft.client.requests import unpack_ids
from weft.messages.sampling import ThinkingMarks

# JSON without free whitespace: a machine's arithmetic decides between few things only, and so the
# steps hardly depend on it.
COLOURS = r'\[("dark red",){0,2}"light green"\]'
PERSON = (
    r'\{"first_name_of_the_person":"(Ann|Bartholomew|Christopher)",'
    r'"age_in_years":[1-9][0-9]?,'
    rf'"favourite_colours":{COLOURS}\}}'
)
NAMES = ["first_name_of_the_person", "age_in_years", "favourite_colours"]


def run(*, jump: bool) -> tuple[list[list[int]], int]:
    """The tokens of some answers, and how many steps they took."""
    # Guesses and the bound of `max_slowdown` follow measured times, and so would the steps.
    llm = LLM(
        grammar_jump=jump,
        threads=1,
        kv_tokens=8_192,
        speculative="off",
        max_slowdown=-1.0,
    )
    grammar = Grammar("regex", PERSON)
    params = [
        SamplingParams(max_new_tokens=250, temperature=temperature, seed=i, grammar=grammar)
        for i, temperature in enumerate([0, 0, 0, 1, 1, 1])
    ]
    answers = llm.generate(
        [f"Tell me of {name}:" for name in ("Ann", "Bob", "Carl", "Dora", "Eve", "Fay")], params
    )
    for answer in answers:
        assert answer.finish_reason == "stop"
        assert re.fullmatch(PERSON, answer.text)
        assert list(json.loads(answer.text)) == NAMES
    stats = llm._own.engine.services.stats()  # type: ignore[attr-defined]
    assert (stats.total_forced_tokens > 0) is jump
    return [answer.token_ids for answer in answers], stats.total_steps


def test_jumps_save_steps_and_change_no_token() -> None:
    jumped, few = run(jump=True)
    stepped, many = run(jump=False)
    assert jumped == stepped
    assert few < 0.5 * many


def test_a_budget_ends_the_reasoning_before_a_grammar() -> None:
    llm = LLM(threads=1, kv_tokens=4_096)
    ids = unpack_ids(llm.prompt("</think>", SamplingParams()).input_ids)
    marks = ThinkingMarks((1,), tuple(ids), is_open=True)
    grammar = Grammar("choice", '["yes, it is", "no"]', behind=marks)
    params = [
        SamplingParams(
            max_new_tokens=90,
            seed=seed,
            grammar=grammar,
            thinking_budget=7,
            thinking_marks=marks,
            ignore_eos=True,
        )
        for seed in range(4)
    ]
    for answer in llm.generate(["Is it?"] * 4, params):
        thoughts = answer.token_ids[: 7 + len(ids)]
        answered = answer.token_ids[7 + len(ids) :]
        assert tuple(thoughts[7:]) == marks.end
        assert answer.text.rpartition("</think>")[2] in ("yes, it is", "no")
        assert answered
        assert answer.finish_reason == "stop"
