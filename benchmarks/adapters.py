"""What adapters cost on a CPU: steps of the shape of Qwen3-0.6B with random weights, with eight adapters of rank 16 on
all matrices of its layers and without any, in turns; and loading one.

    python benchmarks/adapters.py [bf16 | int8 | int4] [--rank 16] [--requests 8] [--layers 28]
    python benchmarks/adapters.py --write FOLDER    only writes the adapters, for benchmarks/peers

Ratios of medians: of the time without adapters to that with them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from experts import KV_TOKENS, greedy
from safetensors.torch import save_file

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.config.projections import HEAD, projections
from weft.executor.build import load_runner
from weft.executor.lora.read import inspect_adapter
from weft.executor.runner import TorchRunner
from weft.plan.device import LoadAdapter, ReadAdapter
from weft.plan.step import ForwardMode, Plan

PROMPT = 512
NUM_ROWS = 64
NUM_PLACES = 8
VOCAB = 151_936


def shape(num_layers: int) -> ModelConfig:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 1024,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": KV_TOKENS,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    return ModelConfig.from_hf(config, "qwen3-0.6b")


def make_adapter(model: ModelConfig, folder: Path, rank: int, seed: int) -> None:
    """As peft writes it, in bfloat16, on the linears of all layers."""
    rng = np.random.default_rng(seed)
    tensors = {}
    targets = set()
    for name, one in projections(model).items():
        if one.is_table or name == HEAD:
            continue
        targets.add(name.rpartition(".")[2])
        for side, size in (("A", (rank, one.in_size)), ("B", (one.out_size, rank))):
            values = rng.standard_normal(size, np.float32) / 100
            tensor = torch.from_numpy(values).to(torch.bfloat16)
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = tensor
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


class LoraSteps:
    """Runs steps of random tokens, with the adapters of the rows or without."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._random = np.random.default_rng(0)

    def run(self, rows: list[int], start: int, num_tokens: int, *, with_adapters: bool) -> float:
        """Milliseconds."""
        index = np.array(rows, np.int32)
        total = len(rows) * num_tokens
        places = index[:, None] * (KV_TOKENS // NUM_ROWS) + start + np.arange(num_tokens)
        plan = Plan(
            step=0,
            mode=ForwardMode.DECODE if num_tokens == 1 else ForwardMode.EXTEND,
            rows=index,
            starts=np.full(len(rows), start, np.int32),
            lens=np.full(len(rows), num_tokens, np.int32),
            tokens=self._random.integers(0, VOCAB, total, dtype=np.int32),
            slots=(places % KV_TOKENS).flatten().astype(np.int32),
            samples=np.ones(len(rows), np.bool_),
            sampling=greedy(np.full(len(rows), start + num_tokens, np.int32)),
        )
        if with_adapters:
            plan = replace(plan, adapters=index % NUM_PLACES)
        began = time.perf_counter()
        self._runner.launch(plan).result()
        return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", choices=["bf16", "int8", "int4"], nargs="?", default="bf16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument(
        "--beside-torch",
        action="store_true",
        help="the same adapters by torch's products, in turns",
    )
    parser.add_argument("--write", metavar="FOLDER", default="")
    args = parser.parse_args()
    model = shape(args.layers)
    if args.write:
        for place in range(NUM_PLACES):
            make_adapter(model, Path(args.write) / str(place), args.rank, place)
        return
    runners = {"weft": make_runner(model, args)}
    if args.beside_torch:
        runners["torch"] = make_runner(model, args, kernels="torch")
    with tempfile.TemporaryDirectory() as folder:
        for place in range(NUM_PLACES):
            make_adapter(model, Path(folder) / str(place), args.rank, place)
        for name, runner in runners.items():
            for label in ("into new memory", "in the place of another"):
                load_all(runner, model, Path(folder), f"{name}, {label}")
    steps = {name: LoraSteps(runner) for name, runner in runners.items()}
    rows = list(range(args.requests))
    with tempfile.TemporaryDirectory() as folder:
        for place in range(NUM_PLACES):
            make_adapter(model, Path(folder) / str(place), args.rank, place)
        for name, runner in runners.items():
            beside_loads(runner, model, Path(folder), steps[name], rows)
    for label, chosen, num_tokens, num_rounds in (
        (f"decode, {args.requests} requests", rows, 1, args.rounds),
        (f"prefill of {PROMPT}", [0], PROMPT, max(args.rounds // 4, 3)),
    ):
        times: dict[tuple[str, bool], list[float]] = {}
        for turn in range(num_rounds + 1):
            for name in runners:
                for with_adapters in (False, True):
                    start = 40 if num_tokens == 1 else 0
                    took = steps[name].run(chosen, start, num_tokens, with_adapters=with_adapters)
                    if turn:
                        times.setdefault((name, with_adapters), []).append(took)
        for name in runners:
            base, own = (statistics.median(times[name, key]) for key in (False, True))
            print(
                f"{name}, {label}: {base:.1f} ms without, {own:.1f} with: {base / own:.3f}",
                flush=True,
            )
    for runner in runners.values():
        runner.close()


def make_runner(model: ModelConfig, args: argparse.Namespace, kernels: str = "auto") -> TorchRunner:
    engine = EngineConfig(
        load_format="dummy",
        device="cpu",
        threads=2,
        quantize="" if args.weights == "bf16" else args.weights,
        max_loaded_loras=NUM_PLACES,
        max_lora_rank=args.rank,
        weights_root="/",
        kernels=kernels,
    )
    return load_runner(
        engine,
        replace(model, quantize=engine.quantize),
        folder=Path(),
        kv_tokens=KV_TOKENS,
        page_size=1,
        max_rows=NUM_ROWS,
        context_length=1024,
    )


def load_all(runner: TorchRunner, model: ModelConfig, folder: Path, label: str) -> None:
    whole = []
    between = []
    for place in range(NUM_PLACES):
        path = folder / str(place)
        info = inspect_adapter(path, model)
        began = time.perf_counter()
        read = runner.control(ReadAdapter(str(path), info.uid)).result()
        was_read = time.perf_counter()
        reply = runner.control(LoadAdapter(place, str(path), info.uid)).result()
        ended = time.perf_counter()
        whole.append((ended - began) * 1e3)
        between.append((ended - was_read) * 1e3)
        assert read.ok, read.message
        assert reply.ok, reply.message
    print(
        f"loading {info.num_bytes / 1e6:.0f} MB ({label}): median "
        f"{statistics.median(whole):.0f} ms, longest {max(whole):.0f}; of these between steps: "
        f"median {statistics.median(between):.1f}, longest {max(between):.1f}",
        flush=True,
    )


def beside_loads(
    runner: TorchRunner, model: ModelConfig, folder: Path, steps: LoraSteps, rows: list[int]
) -> None:
    """Steps while adapters are loaded in the place of others, one after the other."""
    uids = [inspect_adapter(folder / str(place), model).uid for place in range(NUM_PLACES)]
    alone = [steps.run(rows, 40, 1, with_adapters=True) for _ in range(2 * NUM_PLACES)]
    beside = []
    gaps = []
    for place, uid in enumerate(uids):
        path = str(folder / str(place))
        reading = runner.control(ReadAdapter(path, uid))
        while not reading.done():
            beside.append(steps.run(rows, 40, 1, with_adapters=True))
        began = time.perf_counter()
        assert runner.control(LoadAdapter(place, path, uid)).result().ok
        gaps.append((time.perf_counter() - began) * 1e3)
    print(
        f"a step: median {statistics.median(alone):.0f} ms; while an adapter is read: median "
        f"{statistics.median(beside):.0f}, longest {max(beside):.0f}; and between steps "
        f"{statistics.median(gaps):.1f}, longest {max(gaps):.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
