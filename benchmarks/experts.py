"""Steps of a few layers of the shape of Qwen3-30B-A3B, with random weights, in milliseconds.

python benchmarks/experts.py int4 --experts 128 --layers 2
python benchmarks/experts.py int4 --layers 8 --recorder    # what the recorder of experts costs
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.executor.build import load_runner
from weft.executor.runner import TorchRunner
from weft.plan.device import RecordExperts
from weft.plan.step import ForwardMode, Plan, Sampling

KV_TOKENS = 4096
NUM_ROWS = 16
VOCAB = 2048
PROMPT = 512
TURNS = 60  # of a few steps each, every other one with the recorder
STEPS_OF_TURN = 5


def shape(num_layers: int, num_experts: int) -> ModelConfig:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 2048,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": num_experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": KV_TOKENS,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    return ModelConfig.from_hf(config, "qwen3-30b-a3b")


class Steps:
    """Runs steps of random tokens; slots are used again when all have been used."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._random = np.random.default_rng(0)
        self._lens = np.zeros(NUM_ROWS, np.int32)
        self._slot = 0

    def run(self, rows: Sequence[int], num_tokens: int) -> float:
        """Milliseconds of a step with so many tokens of each row."""
        index = np.array(rows, np.int32)
        total = len(rows) * num_tokens
        slots = np.arange(self._slot, self._slot + total, dtype=np.int32)
        self._slot = (self._slot + total) % (KV_TOKENS - NUM_ROWS * PROMPT // 4)
        starts = self._lens[index]
        self._lens[index] += num_tokens
        plan = Plan(
            step=0,
            mode=ForwardMode.DECODE if num_tokens == 1 else ForwardMode.EXTEND,
            rows=index,
            starts=starts,
            lens=np.full(len(rows), num_tokens, np.int32),
            tokens=self._random.integers(0, VOCAB, total, dtype=np.int32),
            slots=slots,
            samples=np.ones(len(rows), np.bool_),
            sampling=greedy(self._lens[index]),
        )
        began = time.perf_counter()
        self._runner.launch(plan).result()
        return (time.perf_counter() - began) * 1e3


def greedy(positions: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Sampling:
    num = len(positions)
    return Sampling(
        temperature=np.zeros(num, np.float32),
        top_p=np.ones(num, np.float32),
        top_k=np.zeros(num, np.int32),
        min_p=np.zeros(num, np.float32),
        seeds=np.zeros(num, np.int64),
        positions=positions,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", choices=["bf16", "int8", "int4"])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--recorder", action="store_true")
    args = parser.parse_args()
    quantize = "" if args.weights == "bf16" else args.weights
    engine = EngineConfig(load_format="dummy", device="cpu", threads=2, quantize=quantize)
    runner = load_runner(
        engine,
        shape(args.layers, args.experts),
        folder=Path(),
        kv_tokens=KV_TOKENS,
        page_size=1,
        max_rows=NUM_ROWS,
        context_length=1024,
    )
    steps = Steps(runner)
    eight = list(range(8))
    steps.run(eight, 4)
    if args.recorder:
        for rows in ([0], eight):
            compare_recorder(runner, steps, rows)
        runner.close()
        return
    for rows, num_tokens, num_steps in (([0], 1, 25), (eight, 1, 12)):
        times = [steps.run(rows, num_tokens) for _ in range(num_steps)]
        print(
            f"{len(rows)} requests: median {statistics.median(times):.2f}, least {min(times):.2f}"
        )
    prompts = [steps.run([8 + index], PROMPT) for index in range(3)]
    print(f"prompt of {PROMPT}: median {statistics.median(prompts):.0f}, least {min(prompts):.0f}")
    runner.close()


def compare_recorder(runner: TorchRunner, steps: Steps, rows: Sequence[int]) -> None:
    """Steps with and without the recorder of experts, in turns; the first of a turn does not count."""
    times: dict[str, list[float]] = {"stop": [], "start": []}
    for turn in range(TURNS):
        action = "start" if turn % 2 else "stop"
        if turn:
            runner.control(RecordExperts(action)).result()
        of_turn = [steps.run(rows, 1) for _ in range(STEPS_OF_TURN)]
        times[action] += of_turn[1:]
    runner.control(RecordExperts("stop")).result()  # the last turn was with it
    without, recorded = (statistics.median(times[action]) for action in ("stop", "start"))
    print(
        f"{len(rows)} requests: {without:.3f} ms, with the recorder {recorded:.3f} ms: "
        f"{100 * (recorded / without - 1):+.1f} %"
    )


if __name__ == "__main__":
    main()
