"""The speed of whole models with random weights: prefill, decode by batch, and 256 requests of 100 to 1,024 tokens in
and out (the offline benchmark that nano-vllm made common), with what the memory of an H200 allows beside them."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpu_parts.engines import Job, Loaded, load, play
from gpu_parts.part import Row, Setting
from weft.bench.workloads import SHAPES
from weft.config.model import ModelConfig

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
}
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
}
TINY |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2_000, "eos_token_id": 2}

MEMORY_BYTES_PER_S = 4.3e12  # of an H200, when it copies


def small_model(setting: Setting) -> Iterator[Row]:
    yield from findings(setting, SHAPES["0.6b"])


def large_model(setting: Setting) -> Iterator[Row]:
    yield from findings(setting, LLAMA_8B)


def findings(setting: Setting, shape: dict[str, Any]) -> Iterator[Row]:
    shape = {**shape, **setting.pick({}, TINY)}
    with tempfile.TemporaryDirectory() as folder:
        room = {
            "max_running_requests": setting.pick(256, 8),
            "context_length": setting.pick(8_448, 256),
        }
        extra = {} if setting.on_gpu else {"kv_tokens": 4_096}
        loaded = load(setting, shape, Path(folder), **room, **extra)
        model = ModelConfig.from_folder(Path(folder))
        yield {
            "what": f"{model.num_parameters / 1e9:.1f} B loaded",
            "seconds": loaded.seconds,
            "kv_tokens": loaded.config.kv_tokens,
            "chunk": loaded.config.chunked_prefill_size,
            "graphs": loaded.config.cuda_graph_sizes.count(",")
            + bool(loaded.config.cuda_graph_sizes),
        }
        yield from crowd(setting, loaded, shape["vocab_size"])
        yield from decode(setting, loaded, model)
        yield from prefill(setting, loaded, shape["vocab_size"])
        loaded.built.runner.close()


def crowd(setting: Setting, loaded: Loaded, vocab_size: int) -> Iterator[Row]:
    """Greedy, and drawn; the first run is not told: kernels are compiled in it."""
    for name, temperature in (("warm-up", 0.0), ("greedy", 0.0), ("drawn", 0.6)):
        rng = random.Random(0)
        most, num = setting.pick((1_024, 256), (40, 8))
        least = setting.pick(100, 10)
        prompts = [
            [rng.randint(0, min(10_000, vocab_size - 1)) for _ in range(rng.randint(least, most))]
            for _ in range(num)
        ]
        jobs = [Job(prompt, rng.randint(least, most), temperature) for prompt in prompts]
        if name == "warm-up":
            play(loaded, [job._replace(output_len=4) for job in jobs])
            flush(loaded)
            continue
        outcome = play(loaded, jobs)
        flush(loaded)
        num_in, num_out = sum(map(len, prompts)), sum(job.output_len for job in jobs)
        yield {
            "what": f"{num} requests, {name}",
            "ok": all(
                len(outcome.tokens[place]) == job.output_len for place, job in enumerate(jobs)
            ),
            "tokens_in": num_in,
            "tokens_out": num_out,
            "seconds": outcome.total_s,
            "out_per_s": num_out / outcome.total_s,
        }


def decode(setting: Setting, loaded: Loaded, model: ModelConfig) -> Iterator[Row]:
    """The time of a step by the number of requests, with about a thousand cached tokens each."""
    cached = setting.pick(1_000, 100)
    for num in setting.pick((1, 8, 64, 256), (1, 8)):
        rng = np.random.default_rng(num)
        outcome = play(loaded, [Job(rng.integers(0, 1_000, cached), 64) for _ in range(num)])
        flush(loaded)
        whole = [taken for together, taken in outcome.steps if together == num][4:]
        step = statistics.median(whole)
        read = model.weights_bytes + num * (cached + 32) * model.kv_bytes_per_token
        yield {
            "what": f"decode of {num}, {cached} cached",
            "ms": step * 1e3,
            "out_per_s": num / step,
            "least_ms_of_memory": read / MEMORY_BYTES_PER_S * 1e3,
        }


def prefill(setting: Setting, loaded: Loaded, vocab_size: int) -> Iterator[Row]:
    long = setting.pick(8_192, 128)
    for num in (8, 1):
        taken = []
        for seed in range(4):
            rng = np.random.default_rng(seed)
            outcome = play(
                loaded, [Job(rng.integers(0, vocab_size, long // num), 1) for _ in range(num)]
            )
            flush(loaded)
            taken.append(outcome.total_s)
        seconds = statistics.median(taken[1:])
        yield {
            "what": f"prefill of {num} x {long // num}",
            "ms": seconds * 1e3,
            "in_per_s": long / seconds,
        }


def flush(loaded: Loaded) -> None:
    """Nothing of one run is cached for the next."""
    scheduler = loaded.built.engine.scheduler
    assert not scheduler.has_work
    scheduler.kv.reset_cache()
