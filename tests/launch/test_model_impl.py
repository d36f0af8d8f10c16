"""`--model-impl`: whose code computes a model, and everything that can be asked of one that
transformers computes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.executor.driver import Driver, Turn, make_driver
from tests.launch.tiny_model import write_tiny_model
from tests.models import by_library
from tests.models.many import saved
from weft import LLM, SamplingParams
from weft.assemble import model_config
from weft.assemble.model_config import choose_model
from weft.assemble.prepare import prepare
from weft.cli import main as cli
from weft.config.engine import EngineConfig
from weft.config.model import UnsupportedModel
from weft.launch import supervisor
from weft.messages.sampling import Grammar
from weft.models.transformers_backend import library
from weft.models.transformers_backend.describe import described
from weft.plan.device import GetWeight, ReleaseMemory, ResumeMemory, UpdateFromDisk

SIZES = {"vocab_size": 258, "eos_token_id": 257, "max_position_embeddings": 256}
SMALL: dict[str, Any] = {"kv_tokens": 1_024, "threads": 1, "device": "cpu"}


def write_model(folder: Path, kind: str, **changes: Any) -> Path:
    """A model of random weights, with a tokenizer."""
    write_tiny_model(folder)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    config = by_library.config_of(kind, {**SIZES, **changes})
    saved(by_library.class_of(kind)(config), folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that weft has code of its own for."""
    return write_model(tmp_path_factory.mktemp("llama") / "tiny", "Llama")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that transformers alone has code for."""
    return write_model(tmp_path_factory.mktemp("persimmon") / "tiny", "Persimmon")


@pytest.fixture(scope="module")
def both(llama: Path) -> tuple[LLM, LLM]:
    """The same model by transformers' code and by weft's."""
    settings = {**SMALL, "chunked_prefill_size": 32, "enable_return_hidden_states": True}
    return (
        LLM(llama, model_impl="transformers", **settings),
        LLM(llama, model_impl="weft", **settings),
    )


PROMPTS = ["The quick brown fox", "jumps over the lazy dog and runs " * 3, "a"]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
ASKED = {
    "greedy": GREEDY,
    "several completions": SamplingParams(n=3, seed=7, max_new_tokens=12, temperature=0.8),
    "penalties": msgspec.structs.replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.5),
    "log probabilities": msgspec.structs.replace(GREEDY, logprobs=3, prompt_logprobs=2),
    "a grammar": msgspec.structs.replace(GREEDY, grammar=Grammar("regex", "(ab|cd)+x")),
    "hidden states": msgspec.structs.replace(GREEDY, hidden_states="all"),
    "forbidden tokens": msgspec.structs.replace(GREEDY, logit_bias={3: -5.0}, bad_words=("a",)),
}


@pytest.mark.parametrize("asked", ASKED)
def test_requests_get_what_the_same_model_gives_by_our_own_code(
    both: tuple[LLM, LLM], asked: str
) -> None:
    theirs, ours = (llm.generate(PROMPTS, ASKED[asked]) for llm in both)
    for their, our in zip(theirs, ours, strict=True):
        assert their.token_ids == our.token_ids
        assert their.finish_reason == our.finish_reason
        for mine, yours in zip(their.logprobs, our.logprobs, strict=True):
            assert mine.logprob == pytest.approx(yours.logprob, abs=1e-3)
        if our.hidden_states is not None:
            np.testing.assert_allclose(their.hidden_states, our.hidden_states, atol=1e-3)


def test_prefixes_and_embeddings_are_those_of_our_own_code(both: tuple[LLM, LLM]) -> None:
    prompt = list(range(3, 90))
    vectors = np.random.default_rng(0).normal(size=(9, 64)).astype(np.float32)
    found = []
    for llm in both:
        first, again = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
        assert first.token_ids == again.token_ids
        assert again.cached_tokens > 64
        found.append([first.token_ids, llm.generate([vectors], GREEDY)[0].token_ids])
    assert found[0] == found[1]


def test_requests_that_are_retracted_go_on_as_before(llama: Path) -> None:
    few = {"kv_tokens": 96, "context_length": 64, "schedule_conservativeness": 0.0}
    long = msgspec.structs.replace(GREEDY, max_new_tokens=55)
    llm = LLM(llama, model_impl="transformers", **{**SMALL, **few})
    prompts = [[token] * 5 for token in (5, 9, 13, 17)]
    together = [output.token_ids for output in llm.generate(prompts, long)]
    assert llm._own.engine.scheduler.counters.num_retractions > 0  # type: ignore[attr-defined]
    alone = [llm.generate([prompt], long)[0].token_ids for prompt in prompts]
    assert together == alone


def test_vectors_are_those_of_our_own_code(llama: Path) -> None:
    """A model that generates may make vectors, too."""
    found = []
    for impl in ("transformers", "weft"):
        llm = LLM(llama, model_impl=impl, task="embed", **SMALL)
        found.append(np.array(llm.embed(["one text", "another text"])))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_auto_takes_our_own_code_where_there_is_some(llama: Path, other: Path) -> None:
    assert not choose_model(EngineConfig(model=str(llama)), llama).library_config
    assert choose_model(EngineConfig(model=str(other)), other).library_config


def test_a_model_without_code_of_ours_is_served_with_one_line_of_warning(
    other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepare(EngineConfig(model=str(other), **SMALL))
    assert prepared.model.architecture == "PersimmonForCausalLM"
    lines = [text for text in caplog.messages if "PersimmonForCausalLM is run by the code" in text]
    assert len(lines) == 1


def test_another_process_describes_a_model_alike(other: Path) -> None:
    assert model_config._asked(other, "tiny") == described(other, "tiny")


def test_the_front_does_not_import_transformers() -> None:
    code = (
        "import sys, weft.server, weft.assemble.prepare, weft.launch.supervisor, weft.cli.main\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", by_library.REFUSED)
def test_a_model_that_cannot_run_ends_with_one_line_and_status_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    def served(*args: object) -> None:
        raise AssertionError("it runs")

    monkeypatch.setattr(supervisor, "run", served)
    kind, changes, reason = by_library.REFUSED[name]
    write_tiny_model(tmp_path)
    by_library.config_of(kind, changes).save_pretrained(tmp_path)
    words = ["serve", str(tmp_path), "--port", "0", "--model-impl", "transformers"]
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert by_library.class_of(kind).__name__ in line
    assert reason in line


def test_a_class_that_nobody_has_is_named_and_its_code_is_never_run(tmp_path: Path) -> None:
    write_tiny_model(
        tmp_path, architectures=["NovelForCausalLM"], auto_map={"AutoModelForCausalLM": "x.Novel"}
    )
    with pytest.raises(
        UnsupportedModel, match=r"NovelForCausalLM has no native .*no such class .*never run"
    ):
        choose_model(EngineConfig(model=str(tmp_path)), tmp_path)


def test_the_error_without_the_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    write_tiny_model(tmp_path, architectures=["NovelForCausalLM"])
    with pytest.raises(UnsupportedModel, match=r"pip install 'transformers>=5.23,<6'"):
        choose_model(EngineConfig(model=str(tmp_path)), tmp_path)


@pytest.mark.parametrize("word", ["vllm", "sglang"])
def test_words_of_other_engines_get_those_that_are_allowed(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert cli.main(["serve", "--model-impl", word]) == 2
    assert "one of auto, weft, transformers is expected" in capsys.readouterr().err


@pytest.fixture
def driver(other: Path, tmp_path: Path) -> Any:
    shutil.copytree(other, tmp_path / "old")
    model = described(tmp_path / "old", "tiny")
    driver = make_driver(model, tmp_path / "old", kernels="auto")
    yield driver
    driver.runner.close()


def ask(driver: Driver, request: Any) -> Any:
    return driver.runner.control(request).result()


def test_weights_are_reported_and_changed(driver: Driver, tmp_path: Path) -> None:
    before = driver.run(Turn(0, [5, 6, 7]))
    folder = write_model(tmp_path / "new", "Persimmon")
    changed = by_library.class_of("Persimmon").from_pretrained(folder)
    changed.model.layers[1].mlp.dense_h_to_4h.weight.data.neg_()
    changed.save_pretrained(folder)
    name = "model.layers.1.mlp.dense_h_to_4h.weight"
    values = np.frombuffer(ask(driver, GetWeight(name, 2)).values, np.float32)
    reply = ask(driver, UpdateFromDisk("new"))
    assert reply.ok, reply.message
    after = np.frombuffer(ask(driver, GetWeight(name, 2)).values, np.float32)
    np.testing.assert_array_equal(after, -values)
    assert not np.allclose(driver.run(Turn(1, [5, 6, 7])), before)
    assert ask(driver, UpdateFromDisk("old")).ok
    np.testing.assert_array_equal(driver.run(Turn(2, [5, 6, 7])), before)


def test_weights_of_another_model_are_refused_and_change_nothing(
    driver: Driver, tmp_path: Path
) -> None:
    before = driver.run(Turn(0, [5, 6, 7]))
    write_model(tmp_path / "new", "Persimmon", intermediate_size=64)
    reply = ask(driver, UpdateFromDisk("new"))
    assert not reply.ok
    assert "of another model" in reply.message
    (tmp_path / "new" / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "old" / "config.json").read_text()))
    )
    reply = ask(driver, UpdateFromDisk("new"))
    assert not reply.ok
    np.testing.assert_array_equal(driver.run(Turn(1, [5, 6, 7])), before)


def test_memory_of_weights_comes_back_with_their_content(driver: Driver) -> None:
    before = driver.run(Turn(0, [5, 6, 7]))
    assert ask(driver, ReleaseMemory(("weights",))).ok
    assert ask(driver, ResumeMemory(("weights",))).ok
    np.testing.assert_array_equal(driver.run(Turn(1, [5, 6, 7])), before)


def test_the_doctor_says_whose_code_computes(
    llama: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, words in ((llama, "weft's own"), (other, "that of transformers")):
        assert cli.main(["doctor", str(folder), "--port", "0"]) == 0
        lines = capsys.readouterr().out.splitlines()
        (line,) = [text for text in lines if text.split()[1] == "code"]
        assert line.startswith("ok")
        assert words in line
