"""Bad words, allowed tokens, budgets of reasoning and logit processors with a whole engine: a small
model with random weights, whose tokens are bytes, so that every word is several tokens long."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.launch.tiny_model import TEMPLATE, write_tiny_model
from weft import LLM, Processor, SamplingParams
from weft.config.options import SettingsError
from weft.executor.logit_processors.load import GROUP, load_processors
from weft.messages.sampling import InvalidParam
from weft.plan.logits import NOTHING_LEFT, ProcessorCall

PROMPTS = ["one", "seventeen", "a", "fourteen and some more", "x" * 40]
BEGIN = "<think>"
END = "</think>"
Make = Callable[..., LLM]

PROCESSORS = '''
import torch
from weft import LogitProcessor


class Spells(LogitProcessor):
    """Says these tokens first: shows what a processor knows of the output."""

    def check(self, params):
        if not isinstance(params.get("tokens"), list):
            raise ValueError("tokens must be a list")

    def apply(self, logits, requests):
        for row, one in zip(logits, requests):
            if len(one.output) < len(one.params["tokens"]):
                row.fill_(-torch.inf)
                row[one.params["tokens"][len(one.output)]] = 0


class Repeats(LogitProcessor):
    """Makes the last token of output and prompt likelier."""

    def apply(self, logits, requests):
        for row, one in zip(logits, requests):
            row[int((one.output if len(one.output) else one.prompt)[-1])] += one.params["by"]


class Breaks(LogitProcessor):
    """Raises, or spoils the logits, once so much has been said."""

    def apply(self, logits, requests):
        for row, one in zip(logits, requests):
            if len(one.output) == one.params["at"]:
                if one.params["how"] == "raise":
                    raise ArithmeticError("no such luck")
                row.fill_(float(one.params["how"]))
'''


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE + "{# </think> #}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    file = folder / "mine.py"
    file.write_text(PROCESSORS)

    made = ExitStack()

    @cache
    def make(**settings: Any) -> LLM:
        settings = {"kv_tokens": 2_048, "max_running_requests": 8, "page_size": 4, **settings}
        llm = LLM(
            str(folder),
            load_format="dummy",
            kernels="auto",
            threads=1,
            logit_processors=str(file),
            **settings,
        )
        return made.enter_context(llm)

    with made:
        yield make


SETTINGS: list[dict[str, Any]] = [
    {},
    {"overlap": True, "mixed_chunk": True, "chunked_prefill_size": 8, "prefix_cache": False},
    {"overlap": True, "kv_tokens": 76, "schedule_conservativeness": 0.0},  # some are retracted
]


def sampled(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 24, "seed": 7, "ignore_eos": True, **fields})


def ids_of(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params)
    assert [output.error for output in outputs] == [""] * len(outputs)
    return [output.token_ids for output in outputs]


def alike(make: Make, params: SamplingParams) -> list[list[int]]:
    """What is said with `params`, which must not depend on company, overlap, chunks or
    retraction."""
    usual, *others = [ids_of(make(**settings), params) for settings in SETTINGS]
    assert others == [usual] * len(others)
    ends = slice(None, None, len(PROMPTS) - 1)
    alone = [make().generate(prompt, params)[0].token_ids for prompt in PROMPTS[ends]]
    assert usual[ends] == alone
    return usual


def said(llm: LLM, output: list[int]) -> str:
    """One character for each token."""
    return "".join(
        "·" if token > 255 else llm.tokenizer.token_bytes(token).decode("latin-1")
        for token in output
    )


def tokens_of(llm: LLM, text: str) -> tuple[int, ...]:
    return tuple(llm.tokenizer.encode(text, add_special_tokens=False))


# Words and tokens


def test_bad_words_are_never_said_and_nothing_else_is_lost(make: Make) -> None:
    llm = make()
    params = sampled(allowed_token_ids=tokens_of(llm, "abcd"), max_new_tokens=36, temperature=2.0)
    free = [said(llm, one) for one in ids_of(llm, params)]
    words = (free[0][3:6], free[1][20:22], free[2][10:13], free[3][7:10])
    held = [said(llm, one) for one in alike(make, replace(params, bad_words=words))]
    assert not any(word in text for word in words for text in held)
    assert any(word[:-1] in text for word in words for text in held)


def test_the_first_token_that_differs_would_have_completed_a_bad_word(make: Make) -> None:
    llm = make()
    params = sampled(allowed_token_ids=tokens_of(llm, "abcd"), max_new_tokens=36, temperature=2.0)
    free = [said(llm, one) for one in ids_of(llm, params)]
    word = free[0][12:15]
    held = [said(llm, one) for one in ids_of(llm, replace(params, bad_words=(word,)))]
    for one, other in zip(free, held, strict=True):
        differs = next(
            (
                place
                for place, pair in enumerate(zip(one, other, strict=True))
                if len(set(pair)) > 1
            ),
            None,
        )
        assert one.find(word) == (-1 if differs is None else differs - 2)


def test_the_prompt_is_no_part_of_a_bad_word(make: Make) -> None:
    only_b = sampled(allowed_token_ids=tokens_of(make(), "b"), bad_words=("ab",), max_new_tokens=3)
    assert make().generate("xa", only_b)[0].text == "bbb"


def test_only_allowed_tokens_are_said_whatever_top_k_keeps(make: Make) -> None:
    llm = make()
    few = tokens_of(llm, "xyz")
    for top_k in (-1, 2, 50):
        assert {
            token
            for one in alike(make, sampled(allowed_token_ids=few, top_k=top_k))
            for token in one
        } == set(few)
    [output] = llm.generate("a", sampled(allowed_token_ids=few, top_k=2, logprobs=3))
    assert all(sorted(one.top_ids) == sorted(few) for one in output.logprobs)


def test_a_request_that_is_left_no_token_ends_with_an_error_and_alone(make: Make) -> None:
    llm = make()
    stuck = sampled(allowed_token_ids=tokens_of(llm, "a"), bad_words=("a",))
    outputs = llm.generate(PROMPTS, [sampled(), stuck, sampled(), sampled(), sampled()])
    assert [output.finish_reason for output in outputs] == [
        "length",
        "error",
        "length",
        "length",
        "length",
    ]
    assert outputs[1].error == NOTHING_LEFT
    assert [output.token_ids for output in outputs if not output.error] == [
        output.token_ids for output in llm.generate([PROMPTS[0], *PROMPTS[2:]], sampled())
    ]


# Reasoning. A model with random weights never ends it by itself; its mark is eight tokens long
# here.


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_that_the_prompt_has_begun_ends_after_exactly_so_many_tokens(
    make: Make, budget: int
) -> None:
    params = sampled(thinking_budget=budget, bad_words=("<",), logprobs=0)
    prompts = [prompt + BEGIN for prompt in PROMPTS]
    alone = [make().generate(prompt, params)[0].token_ids for prompt in prompts]
    for settings in SETTINGS:
        llm = make(**settings)
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == alone
        for output in outputs:
            text = said(llm, output.token_ids)
            assert text.index(END) == budget
            assert text.count(END) == 1
            assert output.completion_tokens == 24
            assert [one.logprob for one in output.logprobs[budget : budget + len(END)]] == [
                0.0
            ] * len(END)


def test_a_thinking_budget_changes_no_token_before_it_is_used_up(make: Make) -> None:
    llm = make()
    with_budget = llm.generate("a" + BEGIN, sampled(thinking_budget=9))[0].token_ids
    assert with_budget[:9] == llm.generate("a" + BEGIN, sampled())[0].token_ids[:9]


@pytest.mark.parametrize(
    ("spelled", "budget", "whole"),
    [
        (" <think>", 3, None),  # it begins to reason itself
        ("<think>ab</think>", 5, " <think>ab</think>"[1:]),  # and ends in time
        ("<think>abc</", 5, "<think>abc</think>"),  # it is about to end when its budget ends
        ("x<think>y<think>", 1, "x<think>y</think>"),
        ("No, not. <think>", 3, "No, not. <think>"),  # an answer that speaks of it
    ],
)
def test_reasoning_is_told_from_the_answer_by_its_marks(
    make: Make, spelled: str, budget: int, whole: str | None
) -> None:
    begins = Processor("Spells", {"tokens": list(tokens_of(make(), spelled))})
    params = sampled(
        thinking_budget=budget, processors=(begins,), bad_words=("<",), max_new_tokens=32
    )
    params = params if whole is None else replace(params, bad_words=())
    for output in alike(make, params):
        text = said(make(), output)
        if whole is None:
            assert text.startswith(spelled)
            assert text.index(END) == len(spelled) + budget
        else:
            assert text.startswith(whole)
        assert text.count(END) == (END in (whole or END))


def test_a_budget_holds_for_each_of_n_and_a_stop_string_may_be_its_end(make: Make) -> None:
    llm = make()
    outputs = llm.generate("a" + BEGIN, sampled(thinking_budget=4, n=3, temperature=2.0))
    assert len({output.text for output in outputs}) == 3
    assert [said(llm, output.token_ids).find(END) for output in outputs] == [4] * 3
    [output] = llm.generate("a" + BEGIN, sampled(thinking_budget=4, stop=(END,)))
    assert output.matched == END
    assert output.completion_tokens == 4 + len(END)


# Logit processors


def test_a_processor_sees_the_whole_output_in_any_company(make: Make) -> None:
    spelled = list(tokens_of(make(), "of its own"))
    alone = alike(make, sampled(processors=(Processor("Spells", {"tokens": spelled}),)))
    assert all(output[: len(spelled)] == spelled for output in alone)
    assert len({tuple(output) for output in alone}) > 1
    repeated = alike(make, sampled(processors=(Processor("Repeats", {"by": 8.0}),)))
    same = [one == other for output in repeated for one, other in pairwise(output)]
    assert 0.5 < sum(same) / len(same) < 1


def test_processors_work_one_after_the_other(make: Make) -> None:
    first = list(tokens_of(make(), "ab"))
    second = list(tokens_of(make(), "xyz"))
    both = (Processor("Spells", {"tokens": first}), Processor("Spells", {"tokens": second}))
    assert all(output[:3] == second for output in alike(make, sampled(processors=both)))
    banned = Processor("disallowed_tokens", {"token_ids": list(range(97, 250))})
    for output in alike(make, sampled(processors=(Processor("Spells", {"tokens": [32]}), banned))):
        assert output[0] == 32
        assert not any(97 <= token < 250 for token in output)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "'Breaks' failed: ArithmeticError: no such luck"),
        ("nan", "'Breaks' has left NaN"),
        ("-inf", "token"),
    ],
)
def test_a_processor_that_breaks_ends_its_request_alone(make: Make, how: str, message: str) -> None:
    breaks = [Processor("Breaks", {"at": at, "how": how}) for at in (0, 5, 99)]
    params = [sampled(processors=(one,)) for one in breaks] + [sampled(), sampled(bad_words=("e",))]
    for settings in SETTINGS:
        llm = make(**settings)
        outputs = llm.generate(PROMPTS, params)
        assert [output.completion_tokens for output in outputs] == [0, 5, 24, 24, 24]
        assert [output.finish_reason for output in outputs] == [
            "error",
            "error",
            "length",
            "length",
            "length",
        ]
        assert all(message in output.error for output in outputs[:2])
        for prompt, one, output in list(zip(PROMPTS, params, outputs, strict=True))[2:]:
            assert (
                make().generate(prompt, replace(one, processors=()))[0].token_ids
                == output.token_ids
            )


def test_invalid_processors_are_refused_before_the_request_runs(make: Make) -> None:
    llm = make()
    wrong = [
        (
            Processor("Magic"),
            "no logit processor 'Magic'; known are Breaks, Repeats, Spells, disallowed_tokens",
        ),
        (Processor("Spells", {"tokens": 5}), "'Spells': tokens must be a list"),
        (Processor("disallowed_tokens", {"token_ids": [1], "why": 1}), "no parameter 'why'"),
    ]
    for one, message in wrong:
        [output] = llm.generate("a", sampled(processors=(one,)))
        assert output.finish_reason == "error"
        assert output.completion_tokens == 0
        assert message in output.error
    with pytest.raises(InvalidParam, match="not plain JSON values"):
        llm.generate("a", sampled(processors=(Processor("Spells", {"tokens": [2**70]}),)))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("nowhere.py", "is not a Python file"),
        ("{0}/empty.py", "defines no subclass"),
        ("{0}/empty.py:Magic", "defines no logit processor 'Magic'"),
        ("{0}/broken.py", "SyntaxError"),
        ("{0}/mine.py:Spells,{0}/mine.py:Spells", "two logit processors are called 'Spells'"),
    ],
)
def test_files_that_cannot_be_loaded_stop_the_start(
    tmp_path: Path, files: str, message: str
) -> None:
    (tmp_path / "empty.py").write_text("from weft import LogitProcessor\n")
    (tmp_path / "broken.py").write_text("def\n")
    (tmp_path / "mine.py").write_text(PROCESSORS)
    with pytest.raises(SettingsError, match=message):
        load_processors(files.format(tmp_path))


def test_an_installed_package_brings_processors_by_its_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours.py").write_text(PROCESSORS)
    (tmp_path / "ours-1.dist-info").mkdir()
    (tmp_path / "ours-1.dist-info" / "METADATA").write_text("Name: ours\nVersion: 1\n")
    (tmp_path / "ours-1.dist-info" / "entry_points.txt").write_text(
        f"[{GROUP}]\nspell = ours:Spells\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_processors("").names == ["disallowed_tokens", "spell"]


def num_retractions(llm: LLM) -> int:
    engine: Any = llm._own.engine
    return int(engine.services.stats().total_retractions)


def test_requests_that_go_back_to_the_queue_lose_nothing(make: Make) -> None:
    small = make(**SETTINGS[-1])
    before = num_retractions(small)
    spelled = Processor("Spells", {"tokens": list(tokens_of(small, "<think>"))})
    alike(
        make,
        sampled(
            max_new_tokens=36,
            processors=(spelled,),
            thinking_budget=5,
            bad_words=("a", "bc", "def"),
        ),
    )
    assert num_retractions(small) > before


def test_the_example_of_the_page_does_what_it_says(make: Make, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "logit-processors.md").read_text(
        "utf-8"
    )
    [(name, source)] = re.findall(r"^```python (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / name).write_text(source)
    processors = load_processors(str(tmp_path / name))
    assert processors.names == ["NoRepeats", "disallowed_tokens"]
    assert (
        processors.wrong("NoRepeats", {"n": 0})
        == "logit processor 'NoRepeats': n is 0; 1 to 64 are allowed"
    )
    said = np.array([7, 1, 2, 3, 1, 2], dtype=np.int32)
    params = ({"n": 3}, {"n": 2})
    call = ProcessorCall("NoRepeats", np.arange(2, dtype=np.int32), params, (said, said), (1, 1))
    logits = torch.zeros(2, 5)
    assert processors.apply(logits, call) == {}
    assert logits.tolist() == [[0, 0, 0, -torch.inf, 0], [0, 0, 0, -torch.inf, 0]]
