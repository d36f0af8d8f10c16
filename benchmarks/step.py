"""What a decode step costs on a CPU, and how much of it is spent outside the kernels. Medians, in milliseconds.

    python benchmarks/step.py FOLDER [--requests 16] [--prompt 8000] [--temperature 0.8] [options of weft serve]

The engine runs in this process, with a real model: behind its weights Python finds its data and code out of the caches,
as it does in service. Two versions are compared in turns, each from its own checkout (PYTHONPATH).
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from weft.assemble.build import build_engine
from weft.config.engine import EngineConfig
from weft.config.machine import probe
from weft.config.model import ModelConfig
from weft.config.options import Command
from weft.config.resolve import resolve
from weft.engine.engine import Engine
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.ops.cpp.library import Library

OUTPUT_LEN, ROUNDS = 128, 6
EDGE = 3  # steps at both ends of a round that are no decode steps of all requests


class Kernels:
    """Seconds in the kernel library since `seconds` was set to 0."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("run", "run_fused"):
            if name in vars(Library):
                setattr(Library, name, self._timed(getattr(Library, name)))

    def _timed(self, function: Any) -> Any:
        def timed(*args: Any) -> None:
            began = time.perf_counter()
            function(*args)
            self.seconds += time.perf_counter() - began

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each request before")
    parser.add_argument("--temperature", type=float, default=0.0)
    options, rest = parser.parse_known_args()
    config = (
        Command("step", "", EngineConfig, positional="model")
        .read(rest, os.environ)
        .make(EngineConfig)
    )
    folder = Path(config.model)
    kernels = Kernels()
    engine = build_engine(
        resolve(config, ModelConfig.from_folder(folder), probe()).config, folder
    ).engine
    vocab_size = engine.scheduler.settings.vocab_size
    rounds = [decode(engine, kernels, vocab_size, turn, options) for turn in range(ROUNDS)][1:]
    whole, inside = np.array([step for steps in rounds for step in steps]).T
    step_ms, outside_ms = 1e3 * np.median(whole), 1e3 * np.median(whole - inside)
    share = 100 * outside_ms / step_ms
    print(
        f"{options.requests} requests: step {step_ms:.3f} ms, outside the kernels {outside_ms:.3f} ms = {share:.1f} %"
    )


def decode(
    engine: Engine, kernels: Kernels, vocab_size: int, turn: int, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """Seconds of each decode step of a round: all, and in the library."""
    rng = np.random.default_rng(turn)
    for i in range(options.requests):
        number = turn * options.requests + i
        sampling = SamplingParams(
            max_new_tokens=OUTPUT_LEN, temperature=options.temperature, seed=number, ignore_eos=True
        )
        ids = rng.integers(0, vocab_size, options.prompt).astype(np.int32).tobytes()
        engine.submit(GenerateRequest(id=number, rid=str(number), input_ids=ids, sampling=sampling))
    steps = []
    while engine.has_work:
        kernels.seconds = 0.0
        began = time.perf_counter()
        engine.step()
        steps.append((time.perf_counter() - began, kernels.seconds))
    return steps[EDGE - OUTPUT_LEN : -EDGE]


if __name__ == "__main__":
    main()
