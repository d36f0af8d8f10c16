"""GGUF files through the whole of weft: the same tokens as from safetensors, and one line and exit
status 2 for what is damaged."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.caches import set_own_cache
from tests.executor.gguf_files import damaged, gguf_bytes, random_blocks, write_gguf
from tests.executor.gguf_models import hf_weights, metadata, stored, write_folder
from weft import LLM, SamplingParams
from weft.assemble.build import build_engine
from weft.assemble.model_folder import model_folder
from weft.assemble.prepare import load_template, load_tokenizer, prepare
from weft.cli.main import main
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig, ModelError
from weft.executor.cpu import build
from weft.models.registry import make_model
from weft.ops.cpp.library import Library, Unavailable, load
from weft.ops.plain import PlainOps
from weft.weights.load import load_weights

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
SMALL = {"kv_tokens": 512, "threads": 1}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_own_cache(tmp_path / "cache", monkeypatch)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_file_gives_the_tokens_of_its_safetensors(tmp_path: Path, architecture: str) -> None:
    """Queries and keys of llama's rows are in another order in the file."""
    weights = hf_weights(architecture)
    file = write_gguf(tmp_path / "tiny.gguf", metadata(architecture), stored(weights, architecture))
    folder = write_folder(tmp_path / "folder", weights, architecture)
    described = model_folder(EngineConfig(model=str(file)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(described / name, folder)
    prompts = ["abc def", "The quick brown fox", "x" * 60]
    outputs = []
    for model in (file, folder):
        llm = LLM(str(model), **SMALL)
        assert llm.model.dtype == "float32"
        outputs.append([output.token_ids for output in llm.generate(prompts, GREEDY)])
    assert outputs[0] == outputs[1]
    assert len({tuple(ids) for ids in outputs[0]}) == len(prompts)


def test_codes_give_nearly_the_logits_of_their_widened_weights(tmp_path: Path) -> None:
    """Activations are rounded to 8 bits in products with codes."""
    tensors = stored(hf_weights(hidden_size=256, head_dim=64))
    for seed, name in enumerate(("attn_q", "attn_k", "attn_v", "attn_output")):
        shape = tensors[f"blk.0.{name}.weight"].shape
        kind = ("Q4_K", "Q6_K", "Q5_0", "Q8_0")[seed]
        tensors[f"blk.0.{name}.weight"] = random_blocks(kind, (shape[0], shape[1]), seed)
    values = metadata(embedding_length=256, rope__dimension_count=64)
    file = write_gguf(tmp_path / "tiny.gguf", values, tensors)
    params = SamplingParams(temperature=0.0, max_new_tokens=1, prompt_logprobs=0)
    found = []
    for settings in ({}, {"quantize": "none", "kernels": "torch"}):
        llm = LLM(str(file), **SMALL, **settings)
        [output] = llm.generate(["The quick brown fox jumps over the lazy dog"], params)
        found.append([token.logprob for token in output.prompt_logprobs[1:]])
    assert found[0] == pytest.approx(found[1], abs=0.1)


def test_the_start_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = stored(hf_weights(hidden_size=32, head_dim=8))
    tensors["token_embd.weight"] = random_blocks("Q8_0", (260, 32))
    values = metadata(embedding_length=32, rope__dimension_count=8)
    path = write_gguf(tmp_path / "tiny.gguf", values, tensors)

    def said(**settings: Any) -> str:
        prepared = prepare(EngineConfig(model=str(path), **SMALL, **settings))
        built = build_engine(prepared.config, prepared.folder)
        return built.ready.startup[0][1]

    if find_library() is not None:
        assert said().startswith("Q8_0 as stored, ")
    for settings in ({"quantize": "none"}, {"kernels": "torch"}, {"attention_backend": "torch"}):
        assert said(**settings).startswith("Q8_0 kept as float32, ")

    def unavailable(name: str) -> Library:
        raise Unavailable("there is no compiler")

    monkeypatch.setattr(build, "load", unavailable)
    assert said().startswith("Q8_0 kept as float32, ")


def find_library() -> Library | None:
    try:
        return load("")
    except Unavailable:
        return None


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("weft: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_file_that_ends_early_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = gguf_bytes(metadata(), stored(hf_weights()))
    path = tmp_path / "a.gguf"
    for size in (0, 3, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        assert "a.gguf" in refusal(capsys, "generate", str(path), "--prompt", "a")


def test_scales_that_are_no_numbers_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = stored(hf_weights(hidden_size=32, head_dim=8))
    good = random_blocks("Q8_0", (260, 32))
    nan = np.array([np.nan], np.float16).tobytes()
    tensors["token_embd.weight"] = good._replace(data=good.data[:-34] + nan + good.data[-32:])
    values = metadata(embedding_length=32, rope__dimension_count=8)
    file = write_gguf(tmp_path / "a.gguf", values, tensors)
    said = refusal(capsys, "generate", str(file), "--prompt", "a", "--kv-tokens", "512")
    assert "scales that are not finite" in said


def test_doctor_describes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = stored(hf_weights(hidden_size=32, head_dim=8))
    tensors["token_embd.weight"] = random_blocks("Q8_0", (260, 32))
    values = metadata(embedding_length=32, rope__dimension_count=8)
    main(["doctor", str(write_gguf(tmp_path / "tiny.gguf", values, tensors))])
    said = capsys.readouterr().out
    assert "tiny in " in said
    assert "weights in Q8_0" in said
    assert "as stored" in said
    assert "template works" in said


def test_whatever_is_damaged_loads_or_is_refused(tmp_path: Path) -> None:
    """Each file is a small model with a damaged header: metadata, names, sizes, tokens."""
    whole = gguf_bytes(metadata(), stored(hf_weights()))
    header_len = len(whole) - sum(len(one.data) for one in stored(hf_weights()).values())
    rng = random.Random(5)
    messages = []
    for number in range(250):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged(whole[:header_len], rng)[:header_len] + whole[header_len:])
        try:
            prepared = prepare(EngineConfig(model=str(path), kv_tokens=256))
            load_template(load_tokenizer(prepared.folder))
            config = ModelConfig.from_folder(prepared.folder)
            model = make_model(config, PlainOps(torch.float32, torch.device("cpu")))
            load_weights(model.weights(), prepared.folder)
        except ModelError as exc:
            messages.append(str(exc))
        path.unlink()
    assert 100 < len(messages) < 250
    assert not any("\n" in message for message in messages)


def test_a_described_folder_says_what_the_file_says(tmp_path: Path) -> None:
    values = metadata() | {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    file = write_gguf(tmp_path / "a.gguf", values, stored(hf_weights()))
    folder = model_folder(EngineConfig(model=str(file)))
    sampling = json.loads((folder / "generation_config.json").read_text())
    assert sampling == {"temperature": 0.5, "top_k": 20}
