"""Five workloads of fixed lengths, and two shapes of models with random weights, for comparisons of
engines.

Every prompt is token ids, every output has exactly the requested length (greedy, ignoring the end
of sequence), and all requests of a workload are submitted at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from weft.json_types import JsonObject


class RequestShape(NamedTuple):
    """One request: a prompt whose first `shared_len` tokens are common to all requests, and its
    output length."""

    shared_len: int
    own_len: int
    output_len: int

    @property
    def prompt_len(self) -> int:
        return self.shared_len + self.own_len


class Workload(NamedTuple):
    about: str
    requests: Sequence[RequestShape]
    # its figure counts prompt and output tokens per second, not only output
    counts_prompt: bool = False


def _mixed(num: int) -> list[RequestShape]:
    rng = random.Random(0)
    shapes = []
    for _ in range(num):
        own_len = rng.randint(16, 256)
        output_len = rng.randint(16, 192)
        shape = RequestShape(0, own_len, output_len)
        shapes.append(shape)
    return shapes


WORKLOADS = {
    "w1": Workload("decode: 16 of 64 in, 128 out", [RequestShape(0, 64, 128)] * 16),
    "w2": Workload(
        "prefill: 16 of 512 in, 8 out", [RequestShape(0, 512, 8)] * 16, counts_prompt=True
    ),
    "w3": Workload("shared prefix: 32 of 512 + 32 in, 32 out", [RequestShape(512, 32, 32)] * 32),
    "w4": Workload("mixed: 32 of 16-256 in, 16-192 out", _mixed(32)),
    "w5": Workload("single: one of 64 in, 128 out", [RequestShape(0, 64, 128)]),
}

_QWEN3: JsonObject = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SHAPES: dict[str, JsonObject] = {  # config.json
    "tiny": {
        **_QWEN3,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 32000,
    },
    "0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "1.7b": {
        **_QWEN3,
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
    },
}
