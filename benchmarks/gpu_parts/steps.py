"""Whole steps of a small model: graphs give what eager steps do, overlap what none does, and the GPU in bfloat16 what a
CPU does in float32, but for rounding. On a CPU the recorded program stands in for graphs, and torch for what is eager.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpu_parts.engines import Job, load, play
from gpu_parts.part import Row, Setting
from weft.bench.workloads import SHAPES
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.executor.build import load_runner
from weft.plan.outputs import SampledLogprobs, SampledLogprobsRequest
from weft.plan.step import ForwardMode, Plan, Sampling, find
from weft.weights.load import save_random

ROOM = {
    "max_running_requests": 12,
    "kv_tokens": 8_192,
    "context_length": 1_024,
    "chunked_prefill_size": 256,
}
FOUR_LAYERS = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1_024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2_048,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
# Of Qwen3.5: three layers of four keep a state.
STATES = {
    **FOUR_LAYERS,
    "architectures": ["Qwen3_5ForCausalLM"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
# Every layer sees a window.
WINDOWS = {**FOUR_LAYERS, "architectures": ["MistralForCausalLM"], "sliding_window": 64}
EXACT = {
    "dtype": "float32"
}  # overlap changes what is in a step, and so how bfloat16 rounds: no fault of it


def findings(setting: Setting) -> Iterator[Row]:
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": 2_000,
    }
    shape = {**SHAPES["tiny"], **setting.pick({}, small)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random(ModelConfig.from_hf(shape, "steps"), folder / "model.safetensors")
        yield from same_tokens(setting, shape, folder)
        yield from same_logits(setting, folder)


def states(setting: Setting) -> Iterator[Row]:
    """A model with layers that keep a state, and one with windows in a pool of their own."""
    small = setting.pick({}, {"vocab_size": 2_000, "hidden_size": 128})
    for what, model in (("states", STATES), ("windows", WINDOWS)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shape = {**model, **small}
            save_random(ModelConfig.from_hf(shape, what), folder / "model.safetensors")
            yield from same_as_cpu(setting, what, shape, folder)


def crowd(setting: Setting, vocab_size: int) -> list[Job]:
    """Requests, greedy and drawn, in chunks and behind cached prefixes."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, vocab_size, 300)
    jobs = []
    for number in range(setting.pick(40, 12)):
        prompt = np.concatenate(
            (common[: 75 * (number % 5)], rng.integers(0, vocab_size, 1 + number * 7))
        )
        jobs.append(
            Job(prompt, int(rng.integers(2, setting.pick(100, 20))), 0.8 * (number % 3 == 0))
        )
    return jobs


def same_as_cpu(setting: Setting, what: str, shape: dict[str, Any], folder: Path) -> Iterator[Row]:
    """The tokens of graphs and of eager steps beside those of torch on a CPU."""
    jobs = crowd(setting, shape["vocab_size"])
    ways: dict[str, dict[str, Any]] = {"graphs": {}, "eager": {"cuda_graph": False}}
    if not setting.on_gpu:
        ways = {"kernels": {}}
    on_cpu = setting._replace(device="cpu")
    loaded = load(on_cpu, shape, folder, **ROOM, **EXACT, kernels="torch")
    expected = play(loaded, jobs).tokens
    loaded.built.runner.close()
    for way, settings in ways.items():
        loaded = load(setting, shape, folder, **ROOM, **EXACT, **settings)
        found = play(loaded, jobs).tokens
        loaded.built.runner.close()
        same = np.mean([found[place] == expected[place] for place in range(len(jobs))])
        yield {
            "what": f"{what}, {way} = torch on a cpu",
            "ok": bool(same > 0.5),  # sums in another order may draw another token
            "part": float(same),
        }


def same_tokens(setting: Setting, shape: dict[str, Any], folder: Path) -> Iterator[Row]:
    """Of a crowd of requests."""
    jobs = crowd(setting, shape["vocab_size"])
    eager = {"cuda_graph": False} if setting.on_gpu else {"kernels": "torch"}
    ways: dict[str, dict[str, Any]] = {
        "graphs, overlap": {"overlap": True},
        "graphs": {"overlap": False},
        "eager, overlap": {"overlap": True, **eager},
        "eager": {"overlap": False, **eager},
    }
    found = {}
    for way, settings in ways.items():
        loaded = load(setting, shape, folder, **ROOM, **EXACT, **settings)
        found[way] = play(loaded, jobs)
        loaded.built.runner.close()
    # A step with more padding may round otherwise, where a product takes another path: hence a part.
    for one, other in (
        ("graphs", "graphs, overlap"),
        ("eager", "eager, overlap"),
        ("eager", "graphs"),
    ):
        same = np.mean(
            [found[one].tokens[place] == found[other].tokens[place] for place in range(len(jobs))]
        )
        same_steps = one in other  # the same kernels on the same batches
        yield {
            "what": f"{one} = {other}",
            "ok": bool(same == 1 if same_steps else same > 0.5),
            "part": float(same),
        }


def same_logits(setting: Setting, folder: Path, backend: str = "auto") -> Iterator[Row]:
    """Of 200 tokens, then of 8 decode steps behind them."""
    model = ModelConfig.from_folder(folder)
    ways = (
        {setting.device: "bfloat16", "cpu": "float32"}
        if setting.on_gpu
        else {"cpu": "bfloat16", "cpu ": "float32"}
    )
    on_gpu = {"cuda_graph_sizes": "1,2,4", "attention_backend": backend}
    theirs, ours = (
        logprobs(EngineConfig(device=device.strip(), dtype=dtype, threads=2, **how), model, folder)
        for (device, dtype), how in zip(
            ways.items(), (on_gpu if setting.on_gpu else {}, {}), strict=True
        )
    )
    error = np.sqrt(np.mean((theirs - ours) ** 2))
    best = np.mean(theirs.argmax(-1) == ours.argmax(-1))
    yield {
        "what": f"{setting.device} in bfloat16 = cpu in float32, {len(ours)} steps, attention {backend}",
        "ok": bool(error < 0.05),
        "error_nats": float(error),
        "same_best": float(best),
    }


def logprobs(engine: EngineConfig, model: ModelConfig, folder: Path) -> np.ndarray:
    """Log probabilities of all tokens: [steps, vocab]."""
    size = model.vocab_size
    runner = load_runner(
        engine,
        replace(model, dtype=engine.dtype),
        folder=folder,
        kv_tokens=512,
        page_size=1,
        max_rows=4,
        context_length=256,
    )
    text = np.random.default_rng(2).integers(0, size, 208).astype(np.int32)
    found = []
    for start, stop in ((0, 120), (120, 200), *((place, place + 1) for place in range(200, 208))):
        num = np.ones(1, np.int32)
        nothing = np.zeros(1, np.float32)
        wanted = SampledLogprobsRequest(np.zeros(1, np.int32), size * num)
        sampling = Sampling(
            temperature=nothing,
            top_p=nothing + 1,
            top_k=0 * num,
            min_p=nothing,
            seeds=np.zeros(1, np.int64),
            positions=stop * num,
        )
        slots = np.arange(start, stop, dtype=np.int32)[::-1] + 7
        plan = Plan(
            step=start,
            mode=ForwardMode.DECODE if stop == start + 1 else ForwardMode.EXTEND,
            rows=2 * num,
            starts=start * num,
            lens=(stop - start) * num,
            tokens=text[start:stop],
            slots=slots.copy(),
            samples=np.ones(1, np.bool_),
            sampling=sampling,
            outputs=(wanted,),
        )
        top = find(runner.launch(plan).result().outputs, SampledLogprobs)
        assert top is not None
        values = np.zeros(size, np.float32)
        values[top.top_ids[0]] = top.top_logprobs[0]
        found.append(values)
    runner.close()
    return np.stack(found)
