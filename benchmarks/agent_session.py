"""What a flood costs an agent: the time to the first token of each turn of a session with pauses for tools, alone and
beside requests of another client.

    python -m benchmarks.agent_session [MODEL] [--turns 30] [--clients 4] [--only NAME]

Each way has a server of its own, with two keys. The session is played alone and then beside the flood, with other texts
of the same lengths: a first prompt, and for each turn the answer and a result of a tool behind the prompt before. The
flood are clients that send one prompt after another.
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx

from benchmarks.servers import served

FIRST_LEN = 800
RESULT_LEN = 40
ANSWER_LEN = 16
PAUSE_S = 0.4  # of a tool
FLOOD_PROMPT = 300
FLOOD_OUTPUT = 40
FIRST_ID, LAST_ID = 300, 1_000
BASE = "--threads 1"
AGENT, OTHER = "agent-key", "other-key"


class Way(NamedTuple):
    """Options of the server, and fields of the flood's requests and of the agent's."""

    options: str = ""
    flood: Mapping[str, Any] = MappingProxyType({})
    agent: Mapping[str, Any] = MappingProxyType({})


WAYS = {
    "background": Way(flood={"service_tier": "flex"}),
    "background, slowdown 1.1": Way("--background-slowdown 1.1", {"service_tier": "flex"}),
    "background, 1, steps of 5 ms": Way(
        "--background-slowdown 1 --background-step-ms 5", {"service_tier": "flex"}
    ),
    "same class": Way(),
    "fair(key)": Way('--schedule-policy "fair(key)"'),
    "priority": Way('--schedule-policy "priority > lpm"', agent={"priority": 1}),
}


class Flood:
    """Clients of another key that send one request after another."""

    def __init__(self, url: str, num: int, fields: Mapping[str, Any]) -> None:
        self._url = url
        self._fields = fields
        self._is_ended = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(i,)) for i in range(num)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._is_ended.set()
        for thread in self._threads:
            thread.join()

    def _send(self, number: int) -> None:
        rng = random.Random(1_000 + number)
        body = {"max_tokens": FLOOD_OUTPUT, "ignore_eos": True, **self._fields}
        with client(self._url, OTHER) as http:
            while not self._is_ended.is_set():
                prompt = ids(rng, FLOOD_PROMPT)
                answer = http.post("/v1/completions", json={**body, "prompt": prompt})
                answer.raise_for_status()


def client(url: str, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, timeout=600, headers=headers)


def ids(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(num)]


def session(url: str, seed: int, num_turns: int, fields: Mapping[str, Any]) -> list[float]:
    """The seconds to the first token of each turn."""
    rng = random.Random(seed)
    prompt = ids(rng, FIRST_LEN)
    found = []
    body = {"max_tokens": ANSWER_LEN, "ignore_eos": True, "stream": True, **fields}
    with client(url, AGENT) as http:
        for _ in range(num_turns):
            began_s = time.perf_counter()
            asked = {**body, "prompt": prompt}
            first_s = 0.0
            with http.stream("POST", "/v1/completions", json=asked) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if line.startswith("data: {") and not first_s:
                        first_s = time.perf_counter() - began_s
            found.append(first_s)
            prompt = prompt + ids(rng, ANSWER_LEN + RESULT_LEN)
            time.sleep(PAUSE_S)
    return found


def shown(alone: list[float], beside: list[float]) -> str:
    """Without the first turn, which computes the whole first prompt."""
    ratios = sorted(b / a for a, b in zip(alone[1:], beside[1:], strict=True))
    most = sum(ratio <= 1.2 for ratio in ratios)
    return (
        f"alone {1e3 * statistics.median(alone[1:]):.0f} ms, "
        f"beside {1e3 * statistics.median(beside[1:]):.0f} ms, "
        f"times: median {statistics.median(ratios):.2f}, longest {ratios[-1]:.2f}, "
        f"{most} of {len(ratios)} turns within 1.2; "
        f"first turn {1e3 * alone[0]:.0f} and {1e3 * beside[0]:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure an agent's turns beside a flood.")
    parser.add_argument("model", nargs="?", default="weft-nano")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--clients", type=int, default=4, help="of the flood")
    parser.add_argument("--only", default="", help="ways whose name has this text")
    asked = parser.parse_args()
    for name, way in WAYS.items():
        if asked.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            keys = Path(folder) / "keys"
            keys.write_text(f"@agent {AGENT}\n@other {OTHER}\n")
            options = shlex.split(f"{BASE} {way.options}")
            told = measured(asked, way, [*options, "--api-key-file", str(keys)])
            print(f"{name:26} {told}", flush=True)


def measured(asked: argparse.Namespace, way: Way, options: list[str]) -> str:
    with served("serve", asked.model, *options) as server:
        session(server.url, 0, 3, way.agent)
        alone = session(server.url, 1, asked.turns, way.agent)
        flood = Flood(server.url, asked.clients, way.flood)
        time.sleep(3.0)
        beside = session(server.url, 2, asked.turns, way.agent)
        flood.close()
    return shown(alone, beside)


if __name__ == "__main__":
    main()
