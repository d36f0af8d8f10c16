"""Kills `weft batch run` at random moments, with SIGKILL or, one in four times, with Ctrl-C, and
looks that each line has exactly one result in the end.

    python -m tests.e2e.kill_batch_run --kills 100 --seed 1
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.e2e.kill_cache import MODEL, end
from tests.e2e.kills import run_kills
from tests.e2e.server import HANG_S, Server
from weft.batches.line_file import lines_of

MAX_TOKENS = 20
NUM_LINES = 20_000  # more than are answered before the last kill
SHORTEST_S = 0.3  # a run is not killed before that: then it could not even begin
LONGEST_S = 2.5


def write_lines(source: Path) -> None:
    lines = []
    for index in range(NUM_LINES):
        body = {"prompt": f"line {index}", "max_tokens": MAX_TOKENS, "ignore_eos": True}
        lines.append(json.dumps({"custom_id": f"c{index}"} | body))
    source.write_text("\n".join(lines))


def begun(source: Path, output: Path, url: str) -> subprocess.Popen[bytes]:
    words = ["batch", "run", str(source), "--output", str(output), "--url", url]
    return subprocess.Popen([sys.executable, "-m", "weft", *words], stderr=subprocess.DEVNULL)


def ids(output: Path) -> Counter[str]:
    if not output.exists():
        return Counter()
    found = Counter[str]()
    for line in lines_of(output):
        if line.endswith(b"}"):  # a run that was killed may have left the beginning of a line
            found[json.loads(line)["custom_id"]] += 1
    return found


def run(folder: Path, num_kills: int, seed: int) -> list[int]:
    """Returns how many lines were there after each kill, and at last at the end."""
    rng = random.Random(seed)
    source = folder / "in.jsonl"
    output = folder / "out.jsonl"
    write_lines(source)
    counts: list[int] = []
    server = Server(*MODEL)
    try:
        for _ in range(num_kills):
            process = begun(source, output, server.url)
            time.sleep(rng.uniform(SHORTEST_S, LONGEST_S))
            process.send_signal(signal.SIGINT if rng.random() < 0.25 else signal.SIGKILL)
            process.wait(HANG_S)
            found = ids(output)
            assert not found or max(found.values()) == 1, found.most_common(3)
            assert not counts or len(found) >= counts[-1], "results were lost"
            counts.append(len(found))
        # The last run answers the first lines that are left: the others need not be waited for.
        wanted = counts[-1] + 500
        assert wanted <= NUM_LINES, f"too few lines for {num_kills} kills: {counts}"
        lines = source.read_text().splitlines()
        source.write_text("\n".join(lines[:wanted]))
        assert begun(source, output, server.url).wait(10 * HANG_S) == 0
        found = ids(output)
        assert set(found.values()) == {1}
        left = {f"c{index}" for index in range(wanted)} - set(found)
        assert not left, (sorted(left)[:3], len(left), counts)
        counts.append(len(found))
    finally:
        end(server)
    return counts


def main() -> None:
    num, counts = run_kills(__doc__, run, 20)
    print(f"{num} kills, no line twice and none lost; lines after them: {counts}")


if __name__ == "__main__":
    main()
