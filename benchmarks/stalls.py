"""How long streams wait for their next token beside prompts on a real model, by the bound that is asked for.

python benchmarks/stalls.py MODEL --bounds-ms 0,150,300 --prompt-lens 512,2048

A bound of 0 stands for none at all (--max-slowdown -1); "default" for the settings as they are. All bounds get the
same requests, in turns, in one process. Before the prompts come the streams are alone for a while: that is what their
steps take by themselves.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

from weft.bench.freeze import (
    NO_GRAMMARS,
    SHORTEST_STREAM,
    FreezeLoad,
    FreezeOptions,
    FreezeRun,
    LoadPlayer,
    load_of,
)
from weft.bench.testbed import Testbed
from weft.config.engine import EngineConfig
from weft.config.options import SettingsError
from weft.sim.table import number, table


def main() -> None:
    parser = argparse.ArgumentParser(description="Waits of streams by the bound asked for.")
    parser.add_argument("model")
    parser.add_argument("--bounds-ms", default="0,default,200,400")
    parser.add_argument("--prompt-lens", default="512,2048")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--stream-len", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-mix", action="store_true", help="steps of prompts apart")
    asked = parser.parse_args()
    if asked.stream_len < SHORTEST_STREAM:
        parser.error(f"--stream-len is {asked.stream_len}; at least {SHORTEST_STREAM} is allowed")
    for name in ("prompts", "streams", "rounds"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name} is {getattr(asked, name)}; at least 1 is allowed")
    config = EngineConfig(
        model=asked.model,
        threads=asked.threads,
        kv_tokens=16_384,
        mixed_chunk=not asked.no_mix,
        max_running_requests=asked.streams + 8,
    )
    testbed = Testbed.of(config)
    print(testbed.summary)
    warm = load_for(asked, testbed, 64)
    loads = [load_for(asked, testbed, int(word)) for word in asked.prompt_lens.split(",")]
    bounds: list[str] = asked.bounds_ms.split(",")
    runs: dict[tuple[int, str], list[FreezeRun]] = {}
    play(testbed, bounds[0], warm, 0)  # what is done for the first time takes longer
    for i in range(1, asked.rounds + 1):
        for load in loads:
            for bound in bounds:
                run = play(testbed, bound, load, i)
                runs.setdefault((load.prompt_len, bound), []).append(run)
                print(*row_of(load.prompt_len, bound, [run]), flush=True)
    header = ["prompts", "bound", "p99 alone", "p50", "p99", "longest", "first token", "tokens/s"]
    print(table(header, [row_of(*key, found) for key, found in runs.items()]))


def load_for(asked: argparse.Namespace, testbed: Testbed, prompt_len: int) -> FreezeLoad:
    """Raises SettingsError if the engine has no room for it."""
    options = FreezeOptions(
        streams=asked.streams,
        stream_len=asked.stream_len,
        prompts=asked.prompts,
        prompt_len=prompt_len,
    )
    return load_of(options, testbed)


def play(testbed: Testbed, bound: str, load: FreezeLoad, seed: int) -> FreezeRun:
    changes: dict[str, Any] = {}
    if bound != "default":
        changes = {"max_step_ms": float(bound), "max_slowdown": -1.0}
    engine = testbed.engine(NO_GRAMMARS, **changes)
    vocab_size = testbed.settings.vocab_size
    return LoadPlayer(engine, time.perf_counter, load, vocab_size, seed).play()


def row_of(length: int, bound: str, runs: list[FreezeRun]) -> list[str]:
    """Milliseconds, and tokens a second of all requests together."""
    alone = np.concatenate([run.alone_gaps_s for run in runs])
    gaps = np.concatenate([run.gaps_s for run in runs])
    ttft = np.concatenate([run.ttft_s for run in runs])
    rate = float(np.median([run.num_tokens / run.seconds for run in runs]))
    seconds: list[float] = [
        float(np.percentile(alone, 99)),
        float(np.percentile(gaps, 50)),
        float(np.percentile(gaps, 99)),
        float(gaps.max()),
        float(np.median(ttft)),
    ]
    return [f"{length:,}", bound, *[number(1e3 * one) for one in seconds], number(rate)]


if __name__ == "__main__":
    try:
        main()
    except SettingsError as exc:
        sys.exit(f"stalls.py: {exc}")
