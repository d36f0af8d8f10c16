"""Kills a server with a cache on disk at random moments, with SIGKILL, and looks that the next one
answers as if nothing had happened.

    python -m tests.e2e.kill_cache --kills 50 --seed 1
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from tests.e2e.kills import run_kills
from tests.e2e.server import HANG_S, Server

PROMPT_LEN = 900
NUM_PROMPTS = 6
MODEL = ("--model", "weft-nano")
OPTIONS = (*MODEL, "--cache-write", "through", "--cache-disk-gb", "0.1", "--kv-tokens", "4096")


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    # All begin alike.
    head = random.Random("head").choices(range(10, 4_000), k=300)
    return head + [rng.randrange(10, 4_000) for _ in range(PROMPT_LEN - len(head))]


def answer(server: Server, number: int) -> tuple[list[int], int]:
    """The output of a prompt, and how many of its tokens were found."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": prompt(number), "sampling_params": sampling}
    url = urlsplit(server.url)
    assert url.hostname is not None
    # Closed in any case: the server may be killed meanwhile.
    with closing(HTTPConnection(url.hostname, url.port, timeout=HANG_S)) as connection:
        connection.request(
            "POST", "/generate", json.dumps(body), {"Content-Type": "application/json"}
        )
        told = json.loads(connection.getresponse().read())
    return told["output_ids"], told["meta_info"]["cached_tokens"]


def end(server: Server) -> None:
    """Kill all of its processes."""
    server.engine.kill()
    server.stop(signal.SIGKILL)


def kill_at_random(folder: Path, rng: random.Random, expected: dict[int, list[int]]) -> int:
    """Serve for a while, compare what is answered, and kill the server with all its processes while
    it answers. Returns how many tokens were found."""
    server = Server("--cache-dir", str(folder), *OPTIONS)
    found = 0
    wrong: list[int] = []
    # Prompts begin alike: behind the second answer something was found, however slow the machine
    # is.
    before_kill = rng.randint(2, 12)
    has_answered = threading.Event()

    def ask() -> None:
        nonlocal found
        try:
            for index, number in enumerate(rng.choices(range(NUM_PROMPTS), k=40), start=1):
                output, num_cached = answer(server, number)
                found += num_cached
                if output != expected[number]:
                    wrong.append(number)
                if index == before_kill:
                    has_answered.set()
        except (OSError, HTTPException, ValueError, KeyError):
            pass  # it was killed
        has_answered.set()

    delay_s = rng.uniform(0, 0.3)
    thread = threading.Thread(target=ask)
    thread.start()
    has_answered.wait()
    time.sleep(delay_s)
    end(server)
    thread.join()
    assert not wrong, f"other tokens than without a cache: prompts {wrong}"
    return found


def expectations() -> dict[int, list[int]]:
    """What a server without a cache on disk answers."""
    server = Server(*MODEL)
    try:
        return {number: answer(server, number)[0] for number in range(NUM_PROMPTS)}
    finally:
        end(server)


def run(folder: Path, num_kills: int, seed: int) -> int:
    """Returns how many tokens of prompts were found in all."""
    rng = random.Random(seed)
    expected = expectations()
    found = 0
    for number in range(num_kills):
        found += kill_at_random(folder, rng, expected)
        num_blocks = len(list(folder.rglob("*.kv")))
        print(f"kill {number + 1}: {found:,} tokens found until now, {num_blocks:,} blocks")
    return found


def main() -> None:
    run_kills(__doc__, run, 50)


if __name__ == "__main__":
    main()
