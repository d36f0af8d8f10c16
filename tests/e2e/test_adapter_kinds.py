"""Adapters with DoRA and with rows of tokens beside plain ones: the same bits with any pages, from
the cache, with guesses, and after other adapters had their slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.nano_adapters import NANO, make_adapter
from weft import LLM, SamplingParams

PREFIX = "base_model.model."
TABLE = "model.embed_tokens"
IDS = [40, 41, 300, 4_000]
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    found = {name: make_adapter(root / name, seed) for seed, name in enumerate(("plain", "dora"))}
    found["tokens"] = make_adapter(root / "tokens", 5, endings=("q_proj",))
    weights = load_file(NANO / "model.safetensors")
    generator = torch.Generator().manual_seed(3)

    def complete(name: str, tensors: dict[str, Any], **settings: Any) -> None:
        file = found[name] / "adapter_model.safetensors"
        save_file({**load_file(file), **tensors}, file)
        path = found[name] / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    lengths = {}
    for name in load_file(found["dora"] / "adapter_model.safetensors"):
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        if module in name and f"{module}.weight" in weights:
            length = weights[f"{module}.weight"].float().norm(dim=1)
            length *= 1 + 0.1 * torch.randn(len(length), generator=generator)
            lengths[f"{PREFIX}{module}.lora_magnitude_vector"] = length
    assert lengths
    complete("dora", lengths, use_dora=True)
    size = weights[f"{TABLE}.weight"].shape[1]
    rows = torch.randn(len(IDS), size, generator=generator)
    complete(
        "tokens",
        {f"{PREFIX}{TABLE}.token_adapter.trainable_tokens_delta": rows},
        trainable_token_indices=IDS,
    )
    return found


def answers(folders: dict[str, Path], *, slots: int = 4, **settings: Any) -> list[Any]:
    """Of each adapter and of none, side by side, twice; then of each after others were loaded."""
    llm = LLM(
        "weft-nano",
        threads=1,
        kv_tokens=1_024,
        enable_lora=True,
        max_loaded_loras=slots,
        max_loras_per_batch=slots,
        **settings,
    )
    names = ["", *folders]
    params = SamplingParams(max_new_tokens=16, temperature=0.7, seed=4, logprobs=1)
    found = []
    for name, folder in folders.items():
        llm.load_adapter(name, folder)
    for _ in range(2):
        prompts = [llm.prompt(PROMPT, params, adapter=name) for name in names]
        done = dict(llm.complete(prompts))
        found.append([chances(done[place][0]) for place in range(len(names))])
    for name, folder in reversed(folders.items()):
        llm.unload_adapter(name)
        llm.load_adapter(f"{name} again", folder)
        found.append([chances(llm.generate(PROMPT, params, adapter=f"{name} again")[0])])
    return found


def chances(output: Any) -> list[Any]:
    assert not output.error
    return [*output.token_ids, *(one.logprob for one in output.logprobs)]


def test_each_kind_has_the_same_bits_with_any_settings(folders: dict[str, Path]) -> None:
    expected = answers(folders, speculative="off", page_size=1)
    first, second, *alone = expected
    assert first == second
    assert [[one] for one in reversed(first[1:])] == alone
    assert len({str(one) for one in first}) == 4
    others: dict[str, Any] = {
        "speculative": "tree,ngram",
        "page_size": 16,
        "chunked_prefill_size": 16,
    }
    assert answers(folders, **others) == expected
