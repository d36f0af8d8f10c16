"""What a turn of a coding agent costs the front: processor time beside tokenizing, how often the
conversation is rendered, and how many characters are tokenized.

    python -m benchmarks.agent_turns [--turns 20]

A front with a scripted model gets turns of 24 tools and some 76 kB from a client in another process.
The time is that of the front's own process; its template runs in helpers, whose time is told beside
it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import NamedTuple
from unittest import mock

import tests.server.fake as fake
from tests.agents.front_work import Counter, filled
from tests.agents.model import scripted_model
from tests.agents.shapes import all_shapes

NUM_WARM = 3
SHAPES = {"/v1/messages": "claude code", "/v1/responses": "codex"}
CLIENT = """
import sys, httpx
url = sys.argv[1]
with httpx.Client(timeout=300) as client:
    for line in sys.stdin:
        print(client.post(url, content=line, headers={"content-type": "application/json"}).text
              .replace("\\n", "\\0"), flush=True)
"""


class Counted(NamedTuple):
    """What one turn has cost."""

    front_ms: float
    tokenizing_ms: float
    num_renderings: int
    num_characters: int  # tokenized


def measured(path: str, num_turns: int) -> list[Counted]:
    shape = all_shapes()[SHAPES[path]]
    call = json.dumps({"name": shape.tool, "arguments": {"command": "ls", "cmd": "ls"}})
    counter = Counter()
    turns: list[Counted] = []
    said = f"<tool_call>\n{call}\n</tool_call>"
    # Tests render in their own process; here the helpers' work is not the front's.
    in_helpers = mock.patch.object(fake, "rendering_here", nullcontext)
    with in_helpers, scripted_model(lambda prompt: said) as (server, _):
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, server.url + shape.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdin is not None
        assert client.stdout is not None
        with counter.counting():
            for _ in range(num_turns + NUM_WARM):
                text = json.dumps(filled(shape.body(), path))
                before = (counter.tokenizing_s, counter.num_renderings, counter.num_characters)
                began_s = time.process_time()
                client.stdin.write(text + "\n")
                client.stdin.flush()
                answer = client.stdout.readline().replace("\0", "\n")
                spent_s = time.process_time() - began_s
                tokenizing_s = counter.tokenizing_s - before[0]
                turns.append(
                    Counted(
                        1e3 * (spent_s - tokenizing_s),
                        1e3 * tokenizing_s,
                        counter.num_renderings - before[1],
                        counter.num_characters - before[2],
                    )
                )
                shape.take(answer)
        client.stdin.close()
        client.wait()
    return turns[NUM_WARM:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the front's part of an agent's turns.")
    parser.add_argument("--turns", type=int, default=20)
    asked = parser.parse_args()
    for path in SHAPES:
        helpers_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        turns = measured(path, asked.turns)
        helpers_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - helpers_s
        columns = list(zip(*turns, strict=True))
        front, tokenizing = (statistics.median(column) for column in columns[:2])
        print(
            f"{path}: front {front:.1f} ms a turn (most {max(columns[0]):.1f}), tokenizing "
            f"{tokenizing:.1f} ms, renderings {columns[2][-1]}, characters tokenized "
            f"{columns[3][-1]:,}; client and helpers {1e3 * helpers_s / len(turns):.1f} ms a turn"
        )


if __name__ == "__main__":
    main()
