"""Many users beside each other: chats with one system prompt, by how many come a second, of servers in turns.

    python benchmarks/peers/users.py --rates 1,2,4,6 \
        weft="python -m weft serve model.gguf --threads 2 --port {port}" \
        llama="llama-server -m model.gguf -t 2 -tb 2 -ngl 0 -c 16384 -np 16 -fa off --port {port}"

Chats arrive by a Poisson process, the same for all servers, and share the first tokens of their prompts. Each server is
started for each rate, and has computed the shared tokens before (in as many requests at once as --warm says), as if it had
served for a while. A chat is good if its first token comes within 2 seconds, and 99 % of the gaps between its tokens
are 100 ms or less. Each round has prompts of its own.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import numpy as np
from over_http import serving

from weft.bench.http import HttpClient
from weft.bench.serving import ClientRequest, ServingLoad, ServingRun, run
from weft.server.serve import run as run_loop

FIRST_TOKEN_S, GAP_S = 2.0, 0.1  # of a good chat, at most
SHARED, OWN, OUTPUT = 512, 64, 64
COLUMNS = (
    "chats/s",
    "good %",
    "TTFT p50 s",
    "TTFT p99 s",
    "gaps p50 ms",
    "gaps p99 ms",
    "tokens/s",
)


async def measured(url: str, load: ServingLoad, num_warm: int) -> ServingRun:
    """The load, after the prompt that its chats share."""
    server = HttpClient(url)
    if num_warm:
        shared = replace(load, num_requests=num_warm, input_len=load.shared_len, rate=0.0)
        await run(server, shared)
    return await run(server, load)


def is_good(call: ClientRequest) -> bool:
    return call.ttft_s <= FIRST_TOKEN_S and np.percentile(call.itl_s, 99) <= GAP_S


def row_of(rate: float, outcome: ServingRun) -> list[float]:
    """The values of the columns. A request that failed is not good, and has no times."""
    first_s: list[float] = [math.nan]
    gaps_s: list[float] = [math.nan]
    for call in outcome.answered:
        first_s.append(call.ttft_s)
        gaps_s += call.itl_s
    num_good = sum(is_good(call) for call in outcome.answered)
    return [
        rate,
        100 * num_good / len(outcome.calls),
        *np.nanpercentile(first_s, (50, 99)).tolist(),
        *(1e3 * np.nanpercentile(gaps_s, (50, 99))).tolist(),
        outcome.output_per_s,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--rates", default="1,2,4,6,8", help="chats a second")
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument(
        "--warm", type=int, default=16, help="requests with the shared prompt first"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    options = parser.parse_args()
    print(" " * 10, *(f"{name:>11}" for name in COLUMNS))
    for number in range(options.rounds):
        for rate in map(float, options.rates.split(",")):
            load = ServingLoad(
                num_requests=options.chats,
                input_len=SHARED + OWN,
                output_len=OUTPUT,
                rate=rate,
                shared_len=SHARED,
                seed=options.seed + number,
            )
            for server in options.servers:
                name, _, command = server.partition("=")
                with serving(command) as url:
                    outcome = run_loop(measured(url, load, options.warm))
                row = row_of(rate, outcome)
                print(f"{name:10}", *(f"{value:11.3g}" for value in row), flush=True)


if __name__ == "__main__":
    main()
