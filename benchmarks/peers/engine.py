"""What all engines share: commands in, times out.

A command is a line `WORKLOAD SEED`; the answer is a line of JSON with the seconds from submitting all requests to the
last token. Lines that begin otherwise are the engine's own talk. `w3w` is w3 after a first request has left the prefix in
the cache. `d1` and `d16` hardly do anything but decode, `p1` and `p8` are a prompt alone. In `a1` and `a2`, each request has an
adapter (LoRA) of its own.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from weft.bench.workloads import WORKLOADS, RequestShape, Workload

ANSWER = "@@ "
FIRST_ID, LAST_ID = 100, 30_000
WARM = "w3w"

ADAPTER_WORKLOADS = {
    "a1": Workload("8 adapters: 8 of 4 in, 64 out", [RequestShape(0, 4, 64)] * 8),
    "a2": Workload("an adapter: 1 of 512 in, 1 out", [RequestShape(0, 512, 1)], counts_prompt=True),
}

# The two halves of a request, each by itself.
HALF_WORKLOADS = {
    "d1": Workload("decode of one: 1 of 4 in, 64 out", [RequestShape(0, 4, 64)]),
    "d16": Workload("decode of sixteen: 16 of 4 in, 32 out", [RequestShape(0, 4, 32)] * 16),
    "p1": Workload("a prompt: 1 of 512 in, 1 out", [RequestShape(0, 512, 1)], counts_prompt=True),
    "p8": Workload("long: 1 of 8,000 in, 1 out", [RequestShape(0, 8_000, 1)], counts_prompt=True),
}
MORE_WORKLOADS = ADAPTER_WORKLOADS | HALF_WORKLOADS

Generate = Callable[
    [list[list[int]], list[int]], None
]  # prompts, and how many tokens to generate for each
# The same, and the number of each request's adapter.
GenerateAdapted = Callable[[list[list[int]], list[int], list[int]], None]


def serve(generate: Generate, adapted: GenerateAdapted | None = None) -> None:
    _answer({"ready": True})
    for line in sys.stdin:
        name, seed = line.split()
        jobs = workload_of(name).requests
        prompts = prompts_of(jobs, int(seed))
        if name == WARM:
            first = prompts_of(jobs, int(seed), own_seed=-1)[0]
            generate([first], [1])
        lens = [job.output_len for job in jobs]
        began = time.perf_counter()
        if name in ADAPTER_WORKLOADS:
            assert adapted is not None, "this engine was started without adapters"
            adapted(prompts, lens, list(range(len(prompts))))
        else:
            generate(prompts, lens)
        seconds = time.perf_counter() - began
        _answer({"seconds": seconds, "peak_mb": peak_mb()})


def workload_of(name: str) -> Workload:
    if name in MORE_WORKLOADS:
        return MORE_WORKLOADS[name]
    return WORKLOADS["w3" if name == WARM else name]


def prompts_of(jobs: object, seed: int, own_seed: int | None = None) -> list[list[int]]:
    """The prompts of a workload; with `own_seed`, others that share their prefix."""
    rng = random.Random(seed)
    listed: list[RequestShape] = list(jobs)  # type: ignore[call-overload]
    head = _ids(rng, max(job.shared_len for job in listed))
    if own_seed is not None:
        rng = random.Random(own_seed)
    return [head[: job.shared_len] + _ids(rng, job.own_len) for job in listed]


def peak_mb() -> float:
    """Of this process and of those that it has started and that are still there."""
    total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    for child in _children(os.getpid()):
        try:
            status = Path(f"/proc/{child}/status").read_text()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) / 1e3 for line in status.splitlines() if line.startswith("VmHWM")
        )
    return total


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *_children(int(child))]
    return found


def _ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)]


def _answer(content: dict[str, object]) -> None:
    print(ANSWER + json.dumps(content), flush=True)
