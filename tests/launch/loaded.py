"""Engines of several ranks in this process, and their answers."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tests.nano_adapters import NANO
from weft import LLM, SamplingParams
from weft.assemble.build import Built, build_engine
from weft.assemble.prepare import load_tokenizer, prepare
from weft.config.engine import EngineConfig
from weft.messages.sampling import Grammar
from weft.plan.device import DeviceReply, DeviceRequest

SETTINGS: dict[str, Any] = {
    "model": str(NANO),
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "kv_tokens": 1024,
    "max_running_requests": 8,
    "context_length": 256,
    "chunked_prefill_size": 32,
    "page_size": 4,
    "enable_lora": True,
    "weights_root": "/",
}


class Loaded(NamedTuple):
    llm: LLM
    built: Built

    def ask(self, request: DeviceRequest) -> DeviceReply:
        return self.built.runner.control(request).result()

    def close(self) -> None:
        """End the other ranks now."""
        if self.built.ranks is not None:
            self.built.ranks.close()


def load(**settings: Any) -> Loaded:
    prepared = prepare(EngineConfig(**{**SETTINGS, **settings}))
    built = build_engine(prepared.config, prepared.folder)
    tokenizer = load_tokenizer(prepared.folder)
    return Loaded(LLM.composed(prepared, tokenizer, built.engine, built.ready), built)


def mixed_requests(num: int) -> tuple[list[str], list[SamplingParams]]:
    """Of many kinds: they run beside each other, prompts come in chunks, and memory runs short."""
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.0, "grammar": Grammar("json_schema", schema)},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 1.0, "top_p": 0.8, "seed": 11, "min_new_tokens": 4},
        {"temperature": 0.0, "logit_bias": {65: 4.0}, "n": 2},
    ]
    prompts = []
    params = []
    for index in range(num):
        prompts.append(f"# request {index % 5}\nimport os\n" + "def f(x):\n" * (index * 3 % 17))
        params.append(SamplingParams(max_new_tokens=4 + index % 9, **kinds[index % len(kinds)]))
    return prompts, params


def answers(llm: LLM, num: int) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(*mixed_requests(num))]
