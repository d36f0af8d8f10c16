"""`weft.LLM` with everything real but the model: outputs, order, errors, interruption."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.e2e.server import HANG_S
from tests.launch.oracle_llm import EOS, VOCAB, oracle_llm
from tests.launch.tiny_model import write_tiny_model
from tests.scheduler.oracle_runner import OracleRunner, OracleStep, expected_output
from weft import LLM, Grammar, SamplingParams
from weft.config.engine import EngineConfig
from weft.config.model import ModelError
from weft.config.options import SettingsError
from weft.messages.sampling import InvalidParam
from weft.plan.step import Plan

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


def expected(ids: list[int], max_new: int = 12) -> list[int]:
    return expected_output(ids, max_new, VOCAB, {EOS})


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["one", "seventeen", "a", "fourteen and some more"]
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = llm.tokenizer.encode(prompt)
        assert output.token_ids == expected(ids)
        assert output.prompt_tokens == len(ids)
        assert output.completion_tokens == len(output.token_ids)
        assert output.text == llm.tokenizer.decode([t for t in output.token_ids if t != EOS])
        assert output.finish_reason == ("stop" if output.token_ids[-1] == EOS else "length")


def test_one_text_or_one_list_of_ids_is_one_prompt(llm: LLM) -> None:
    (by_text,) = llm.generate("hello", GREEDY)
    (by_ids,) = llm.generate(llm.tokenizer.encode("hello"), GREEDY)
    assert by_text.token_ids == by_ids.token_ids


def test_many_prompts_as_ids(llm: LLM) -> None:
    outputs = llm.generate([[1, 2, 3], [4, 5]], GREEDY)
    assert [output.token_ids for output in outputs] == [expected([1, 2, 3]), expected([4, 5])]


def test_a_stop_string_ends_a_request_that_is_alone(llm: LLM) -> None:
    [whole] = llm.generate(
        "seventeen", SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    )
    [output] = llm.generate(
        "seventeen", SamplingParams(max_new_tokens=12, temperature=0.0, stop=(whole.text[3:5],))
    )
    assert output.text == whole.text[:3]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("kind", [str, list, tuple])
def test_stop_strings_may_be_a_text_a_list_or_a_tuple(llm: LLM, kind: type) -> None:
    [free] = llm.generate("one", GREEDY)
    stop = free.text[2:4]
    given: Any = stop if kind is str else kind([stop])
    [output] = llm.generate("one", replace(GREEDY, stop=given))
    assert output.text == free.text[:2]
    assert output.matched == stop


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("stop", 3, "stop is 3; a tuple or a list is expected"),
        ("stop", ["\ud800"], r"stop[0] is '\ud800'; a text of valid Unicode is expected"),
        ("bad_words", [b"x"], "bad_words[0] is b'x'; a text is expected"),
        ("bad_word_ids", [3], "bad_word_ids[0] is 3; a tuple or a list of token ids is expected"),
        ("stop_token_ids", "3", "stop_token_ids is '3'; a tuple or a list is expected"),
        ("logit_bias", [1], "logit_bias is [1]; a dictionary of token ids is expected"),
        ("grammar", "[0-9]", "grammar is '[0-9]'; weft.Grammar(kind, text) is expected"),
        ("grammar", Grammar("choice", "3"), "choice is '3'; a JSON list of texts is needed"),
        ("grammar", Grammar("regex", 3), "grammar.text is 3; a text is expected"),  # type: ignore[arg-type]
        ("processors", ["x"], "processors[0] is 'x'; weft.Processor(name, params) is expected"),
        ("hidden_states", "first", "hidden_states is 'first'; one of last, all is expected"),
        ("ignore_eos", 1, "ignore_eos is 1; True or False is expected"),
        (
            "thinking_marks",
            3,
            "thinking_marks is 3; ThinkingMarks(begin, end, is_open) is expected",
        ),
        ("top_k", None, "top_k is None; a whole number is needed, -1 to 2,147,483,647 are allowed"),
        ("temperature", "hot", "temperature is 'hot'; a number is needed, 0 to 2 are allowed"),
    ],
)
def test_a_parameter_of_another_type_is_named(
    llm: LLM, name: str, value: object, words: str
) -> None:
    with pytest.raises(InvalidParam) as caught:
        llm.generate("one", replace(GREEDY, **{name: value}))
    assert str(caught.value) == words
    [output] = llm.generate("one", GREEDY)  # the engine has not taken the wrong value
    assert output.finish_reason in ("stop", "length")


PROMPT = "a text, token ids, an array of input embeddings or a dictionary with a prompt"
MESSAGE = {"role": "assistant", "content": "x"}
MESSAGES = "a list of messages, or a list of such lists,"


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("generate", {"prompts": 3}, f"prompts is 3; {PROMPT}, or a list of these, is expected"),
        ("generate", {"prompts": b"x"}, f"prompts is b'x'; {PROMPT}, or a list of these,"),
        ("generate", {"prompts": ["a", None]}, f"prompts[1] is None; {PROMPT} is expected"),
        ("generate", {"prompts": {"prompt": 3}}, f"prompt is 3; {PROMPT} is expected"),
        ("generate", {"prompts": "a", "params": {"n": 1}}, "params is {'n': 1}; weft.Sampling"),
        ("generate", {"prompts": "a", "params": ["x"]}, "params[0] is 'x'; weft.SamplingParams is"),
        ("generate", {"prompts": "a", "adapter": ["x"]}, "adapter is ['x']; a text is expected"),
        ("generate", {"prompts": "a", "progress": "no"}, "progress is 'no'; True or False is"),
        ("chat", {"messages": 3}, f"messages is 3; {MESSAGES} is expected"),
        ("chat", {"messages": {"role": "user"}}, "messages is {'role': 'user'}; a list of"),
        ("chat", {"messages": [3]}, "messages[0] is 3; a list of messages is expected"),
        ("chat", {"messages": [[]]}, "messages[0] is empty; 1 message or more is expected"),
        ("chat", {"messages": [{"content": "x"}]}, "messages[0].role is None; a text is expected"),
        (
            "chat",
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content is 3; a text or a list of parts is expected",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [3]}]},
            "messages[0].content[0] is 3; a dictionary is expected",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text is None; a text is expected",
        ),
        (
            "chat",
            {"messages": [MESSAGE | {"tool_calls": 5}]},
            "messages[0].tool_calls is 5; a list",
        ),
        ("chat", {"messages": [MESSAGE | {"tool_calls": [5]}]}, "messages[0].tool_calls[0] is 5"),
        ("chat_ids", {"messages": []}, "messages is empty; 1 message or more is expected"),
        ("prompt", {"text": 1.5, "params": GREEDY}, f"prompt is 1.5; {PROMPT} is expected"),
        ("prompt", {"text": "a", "params": None}, "params is None; weft.SamplingParams is"),
        ("load_adapter", {"name": 3, "path": "x"}, "name is 3; a text is expected"),
        ("load_adapter", {"name": "a", "path": 3}, "path is 3; the path of a folder is expected"),
        ("load_adapter", {"name": "a", "path": "x", "pinned": 1}, "pinned is 1; True or False"),
        ("unload_adapter", {"name": ["x"]}, "name is ['x']; a text is expected"),
    ],
)
def test_an_argument_of_another_type_is_named_with_its_value_and_what_is_allowed(
    llm: LLM, method: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidParam) as caught:
        getattr(llm, method)(**arguments)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("stream", {"prompt": "a", "params": []}, "params is []; weft.SamplingParams is expected"),
        ("complete", {"prompts": 3}, "prompts is 3; a list of what LLM.prompt returns is expected"),
        ("complete", {"prompts": ["x"]}, "an entry of prompts is 'x'; what LLM.prompt returns is"),
        ("complete", {"prompts": [], "strict": "no"}, "strict is 'no'; True or False is expected"),
    ],
)
def test_an_argument_of_a_generator_is_named_at_its_first_use(
    llm: LLM, method: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidParam) as caught:
        list(getattr(llm, method)(**arguments))
    assert str(caught.value).startswith(words)


def test_numbers_of_other_libraries_become_plain_ones(llm: LLM) -> None:
    prompt: Any = llm.prompt("one", replace(GREEDY, top_p=np.float32(0.5), top_k=np.int64(3)))
    assert type(prompt.sampling.top_p) is float
    assert type(prompt.sampling.top_k) is int
    ids: Any = [np.int64(1), np.int64(2)]
    [by_numpy] = llm.generate(ids, GREEDY)
    assert by_numpy.token_ids == expected([1, 2])


def test_settings_of_another_type_are_named_also_in_a_config() -> None:
    with pytest.raises(SettingsError, match="config is 3; an EngineConfig is expected"):
        LLM.of(3)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="kv_tokens is 'many'; a whole number is expected"):
        LLM.of(EngineConfig(kv_tokens="many"))  # type: ignore[arg-type]


def test_parameters_for_each_prompt(llm: LLM) -> None:
    outputs = llm.generate(
        [[1], [1]], [SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=3)]
    )
    assert [output.completion_tokens for output in outputs] == [1, 3]
    with pytest.raises(
        InvalidParam, match="params has the length 1; 2 is expected, an entry for each prompt"
    ):
        llm.generate([[1], [1]], [GREEDY])


def test_prompts_without_parameters_get_those_of_the_models_makers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 20}')
    llm, _ = oracle_llm(folder)
    assert llm.default_params.temperature == 0.0
    assert llm.default_params.top_k == 20
    [first], [second] = llm.generate("a"), llm.generate("a")
    assert first.token_ids == second.token_ids  # greedy
    aside, _ = oracle_llm(folder, generation_config="none")
    assert aside.default_params == SamplingParams()


def test_recommended_parameters_out_of_range_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ModelError, match=r"temperature is -1.*--generation-config none"):
        oracle_llm(folder)


def test_n_completions_stand_together(llm: LLM) -> None:
    outputs = llm.generate([[1, 2], [3]], SamplingParams(max_new_tokens=4, n=2))
    assert [output.prompt_tokens for output in outputs] == [2, 2, 1, 1]


def test_second_time_finds_the_prompt_in_the_cache(llm: LLM) -> None:
    prompt = list(range(64))
    (first,) = llm.generate(prompt, GREEDY)
    (second,) = llm.generate(prompt, GREEDY)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 63
    assert first.token_ids == second.token_ids


def test_more_prompts_than_the_queue_holds(folder: Path) -> None:
    llm, _ = oracle_llm(folder, max_queued_requests=3)
    prompts = [[n % 200, n // 200] for n in range(50)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == [expected(ids) for ids in prompts]


def test_prompt_that_does_not_fit_is_refused_and_the_rest_ends(llm: LLM) -> None:
    with pytest.raises(InvalidParam, match="the context of 256 tokens"):
        llm.generate([[1, 2], [1] * 300], GREEDY)
    (output,) = llm.generate([1, 2], GREEDY)
    assert output.token_ids == expected([1, 2])


def test_without_strictness_a_refused_prompt_has_an_output_that_says_why(llm: LLM) -> None:
    prompts = [
        llm.prompt([1, 2], GREEDY),
        llm.prompt([1] * 300, GREEDY),
        InvalidParam("line", "nonsense"),
    ]
    outputs = dict(llm.complete(prompts, strict=False))
    assert outputs[0][0].token_ids == expected([1, 2])
    assert outputs[1][0].finish_reason == "error"
    assert "300 tokens" in outputs[1][0].error
    assert outputs[2][0].error == "nonsense"


def test_stream_gives_the_same_in_pieces(llm: LLM) -> None:
    deltas = list(llm.stream([1, 2, 3], GREEDY))
    assert [token for delta in deltas for token in delta.token_ids] == expected([1, 2, 3])
    assert [delta.end is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert len(deltas) > 3


def test_leaving_a_stream_early_aborts_it(llm: LLM) -> None:
    for _ in llm.stream([1, 2, 3], SamplingParams(max_new_tokens=200, ignore_eos=True)):
        break
    llm.generate([9], GREEDY)
    assert not llm._own.engine.has_work


def out_of_time(*_: object) -> None:
    raise TimeoutError


@pytest.mark.parametrize(
    ("signum", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, TimeoutError)]
)
def test_a_signal_waits_for_the_end_of_the_step_and_leaves_the_engine_usable(
    folder: Path, signum: int, raised: type[BaseException]
) -> None:
    llm, runner = oracle_llm(folder)

    class Interrupting(OracleRunner):
        def launch(self, plan: Plan) -> OracleStep:
            if plan.step == 5:
                os.kill(os.getpid(), signum)
            return super().launch(plan)

    runner.__class__ = Interrupting
    at_first = signal.signal(signal.SIGALRM, out_of_time)
    before = signal.getsignal(signum)
    try:
        with pytest.raises(raised):
            llm.generate([[1], [2], [3]], SamplingParams(max_new_tokens=100, ignore_eos=True))
        assert signal.getsignal(signum) is before
    finally:
        signal.signal(signal.SIGALRM, at_first)
    (output,) = llm.generate([4, 5], GREEDY)
    assert output.token_ids == expected([4, 5])
    assert not llm._own.engine.has_work


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ids = llm.tokenizer.encode("user: Hi\nassistant:", add_special_tokens=False)
    assert llm.chat_ids(messages) == ids
    (output,) = llm.chat(messages, GREEDY)
    assert output.token_ids == expected(ids)
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_model_without_template_cannot_chat(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(SettingsError, match="no chat template"):
        oracle_llm(folder)[0].chat([{"role": "user", "content": "Hi"}])


def test_unknown_setting_is_named() -> None:
    with pytest.raises(SettingsError, match="no setting 'kv_token'; did you mean kv_tokens"):
        LLM("/nowhere", kv_token=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "fp32"}, "dtype is 'fp32'; one of auto, float32, bfloat16, float16 is expected"),
        ({"threads": -1}, "threads is -1; 0 to 1,024 is expected"),
        ({"threads": "two"}, "threads is 'two'; a whole number is expected"),
        ({"overlap": "yes"}, "overlap is 'yes'; true or false is expected"),
        ({"context_length": 1.5}, "context_length is 1.5; a whole number is expected"),
    ],
)
def test_settings_are_held_to_what_the_command_line_takes(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        LLM("/nowhere", **settings)
    assert str(caught.value) == message


def test_settings_may_be_paths_and_numbers_of_other_libraries(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):  # all of them are taken
        LLM(tmp_path, kv_tokens=np.int64(4_096), overlap=None, aging_s=3)


def test_code_that_a_model_brings_is_told_to_be_left_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle_llm(
        write_tiny_model(
            tmp_path, auto_map={"AutoModelForCausalLM": "modeling_loom.LoomForCausalLM"}
        )
    )
    [line] = [
        record.getMessage()
        for record in caplog.records
        if "modeling_loom.py" in record.getMessage()
    ]
    assert "never run" in line


# ---- the end


def loaded(folder: Path, cache: Path) -> LLM:
    """With threads for steps, grammars and a store."""
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "cache_block": 16}
    llm = LLM(folder, kv_tokens=512, threads=1, cache_dir=str(cache), **settings)
    digits = Grammar(kind="regex", text="[0-9]+")
    llm.generate("one", SamplingParams(max_new_tokens=2, temperature=0.0, grammar=digits))
    return llm


def left_of(before: set[threading.Thread]) -> list[str]:
    """The threads that are new, once they have had the time to end."""
    new = set(threading.enumerate()) - before
    for thread in new:
        thread.join(HANG_S)
    return [thread.name for thread in new if thread.is_alive()]


def num_pipes() -> int:
    folder = Path("/proc/self/fd")
    return sum("pipe:" in os.readlink(file) for file in folder.iterdir() if file.is_symlink())


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "collected"])
def test_threads_files_and_memory_end_with_an_llm(
    folder: Path, tmp_path: Path, is_closed: bool
) -> None:
    gc.collect()  # of other tests
    before = set(threading.enumerate())
    pipes = num_pipes()
    llm = loaded(folder, tmp_path / "cache")
    assert set(threading.enumerate()) - before
    runner = weakref.ref(llm._own.engine.surroundings.runner)  # type: ignore[attr-defined]
    if is_closed:
        llm.close()
        gc.collect()
        assert runner() is None
    del llm
    assert left_of(before) == []
    assert num_pipes() <= pipes


def test_a_closed_llm_says_so(folder: Path) -> None:
    with oracle_llm(folder)[0] as llm:
        assert llm.generate("one", GREEDY)
    llm.close()
    with pytest.raises(SettingsError, match="it is closed"):
        llm.generate("one", GREEDY)
    with pytest.raises(SettingsError, match="it is closed"):
        next(llm.stream("one", GREEDY))
