"""Run workloads on several engines in turns. compare.py [--workloads ..] [--rounds N] [--json FILE] NAME=COMMAND ..."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

from engine import ANSWER, workload_of

ROOT = Path(__file__).parents[2]  # where commands are run
# Threads of OpenMP look out for work for 0.2 s after a turn, which would take the cores from the next engine.
PAUSE_S = 0.5


class Engine:
    """One engine in its own process."""

    def __init__(self, name: str, command: str) -> None:
        self.name = name
        self.peak_mb = 0.0
        self.seconds: dict[str, list[float]] = {}
        began = time.perf_counter()
        self._process = subprocess.Popen(
            shlex.split(command), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()
        self.start_s = time.perf_counter() - began

    def run(self, workload: str, seed: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{workload} {seed}\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.peak_mb = answer["peak_mb"]
        return answer["seconds"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                found: dict[str, float] = json.loads(line.removeprefix(ANSWER))
                return found
        sys.exit(f"{self.name} has ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--workloads", default="w1,w2,w3,w3w,w4,w5")
    parser.add_argument("--rounds", type=int, default=3, help="measured; one more goes before")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    names = options.workloads.split(",")
    engines = [Engine(*text.split("=", 1)) for text in options.engines]
    for seed in range(options.rounds + 1):
        for name in names:
            for engine in engines:
                time.sleep(PAUSE_S)
                seconds = engine.run(name, 1_000 * seed + 10 * names.index(name))
                if seed:
                    engine.seconds.setdefault(name, []).append(seconds)
                    print(f"round {seed} {name} {engine.name} {seconds:.2f} s", file=sys.stderr)
    results = []
    print(f"{'':14}" + "".join(f"{name:>10}" for name in names) + f"{'peak MB':>10}{'start s':>9}")
    for engine in engines:
        figures = {name: _speed(name, statistics.median(engine.seconds[name])) for name in names}
        line = "".join(f"{figures[name]:10,.1f}" for name in names)
        print(f"{engine.name:14}{line}{engine.peak_mb:10,.0f}{engine.start_s:9.1f}")
        facts = {"engine": engine.name, "peak_mb": engine.peak_mb, "start_s": engine.start_s}
        results.append(facts | {"tokens_per_s": figures, "seconds": engine.seconds})
        engine.close()
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


def _speed(name: str, seconds: float) -> float:
    """Output tokens a second; for a workload of prefill, all tokens."""
    workload = workload_of(name)
    prompt = sum(job.prompt_len for job in workload.requests) if workload.counts_prompt else 0
    return (prompt + sum(job.output_len for job in workload.requests)) / seconds


if __name__ == "__main__":
    main()
