"""What weft sim says of settings that were not served, from a journal of others, against what was measured when they were.

    python benchmarks/whatif.py [MODEL] --keep FOLDER
    python benchmarks/whatif.py --journals FOLDER

Serves the same loads under each of some settings, in turns, each with a journal; then asks each journal for
the settings of every other one, and for its own. With --journals nothing is served: those of an earlier run are asked.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from servers import served

from weft.bench.http import HttpClient
from weft.bench.serving import ServingLoad, run
from weft.journal.file import JournalReader
from weft.sim.fit import fit_usual
from weft.sim.journal import Journal, read_journal
from weft.sim.report import Slo, summarize
from weft.sim.run import Record, simulate
from weft.sim.table import table

SETTINGS = {
    "chunks of 512": ["--chunked-prefill-size", "512"],
    "chunks of 64": ["--chunked-prefill-size", "64"],
    "4 rows": ["--chunked-prefill-size", "512", "--max-running-requests", "4"],
}


async def play(asked: argparse.Namespace, clients: dict[str, HttpClient]) -> None:
    """The same loads to each server, in turns: a machine does not keep its speed."""
    for number in range(asked.rounds):
        load = ServingLoad(
            num_requests=asked.requests // asked.rounds,
            input_len=asked.input_len,
            output_len=asked.output_len,
            shared_len=asked.input_len // 2,
            rate=asked.rate,
            seed=number,
        )
        for name, client in clients.items():
            await run(client, load)
            print(f"served: {name}", flush=True)


def serve_all(asked: argparse.Namespace, folder: Path) -> None:
    clients: dict[str, HttpClient] = {}
    with ExitStack() as servers:
        for name, settings in SETTINGS.items():
            options = ["--journal", str(path_of(folder, name)), "--threads", str(asked.threads)]
            options += ["--no-page", "--max-running-requests", "16", *settings]
            server = servers.enter_context(served("serve", asked.model, *options))
            clients[name] = HttpClient(server.url)
        asyncio.run(play(asked, clients))


def path_of(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-')}.journal"


def asked_of(journal: Journal, other: Journal) -> Record:
    """What would have been with the settings of another one."""
    cost = fit_usual(journal.steps).cost
    return simulate(
        other.settings,
        cost,
        journal.arrivals,
        overlap=journal.overlaps,
        speed=journal.speed(cost),
    )


def figures(record: Record) -> list[float]:
    """Tokens a second of the time in which a request was open, and p50 of times in milliseconds."""
    summary = summarize(record, Slo())
    order = np.argsort(record.sent_s)
    began_s = record.sent_s[order]
    ended_s = np.maximum.accumulate(record.end_s[order])
    pauses_s = np.maximum(began_s[1:] - ended_s[:-1], 0.0).sum()
    open_s = float(ended_s[-1] - began_s[0] - pauses_s)
    times = [summary.ttft_s[0], summary.itl_s[0], summary.e2e_s[0]]
    return [record.output_len.sum() / open_s, *[1_000 * time_s for time_s in times]]


def main() -> None:
    parser = argparse.ArgumentParser(description="What weft sim says, and what really was.")
    parser.add_argument("model", nargs="?", default="weft-nano")
    parser.add_argument("--requests", type=int, default=110)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", default="", help="folder for the journals")
    parser.add_argument("--journals", default="", help="folder with those of an earlier run")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the server
    scratch = TemporaryDirectory(prefix="weft-whatif-")  # removed when this program ends
    folder = Path(asked.journals or asked.keep or scratch.name)
    if not asked.journals:
        serve_all(asked, folder)
        if asked.keep:
            return
    journals: dict[str, Journal] = {}
    for name in SETTINGS:
        with JournalReader(path_of(folder, name)) as reader:
            journals[name] = read_journal(reader)
    header = [
        "recorded with",
        "asked for",
        "tokens/s",
        "TTFT p50, ms",
        "ITL p50, ms",
        "E2E p50, ms",
    ]
    rows = []
    for name, journal in journals.items():
        for wanted, other in journals.items():
            really = figures(other.record)
            said = figures(asked_of(journal, other))
            cells = []
            for was, now in zip(really, said, strict=True):
                cells.append(f"{was:,.3g} → {now:,.3g} ({now / was - 1:+.0%})")
            rows.append([name, wanted, *cells])
    print(table(header, rows))
    for name, journal in journals.items():
        found = fit_usual(journal.steps)
        print(
            f"{name}: --cost {found.text}, half of {found.num_steps:,} steps met to {found.median_error:.0%}"
        )


if __name__ == "__main__":
    main()
