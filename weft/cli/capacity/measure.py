"""Measures a machine: a server with a journal, loads of all kinds over HTTP, and the cost of steps
and of the front from both sides."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import platform
import re
import tempfile
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from weft.bench.http import HttpClient, HttpError
from weft.bench.played import PlayedTrace, play
from weft.capacity.machine import FrontCost, MeasuredMachine, fit_front, measured_machine
from weft.capacity.workload import FIRST_ID, LAST_ID
from weft.cli.capacity.served import measured_server, words_of
from weft.config.options import SettingsError
from weft.journal.file import JournalError, JournalReader
from weft.journal.replay import BadJournal
from weft.sim.journal import Journal, read_journal
from weft.sim.synthetic import Lengths
from weft.sim.trace import Arrival

OptionValue: TypeAlias = str | int | float | bool
Pair: TypeAlias = tuple[int, int]  # tokens of a prompt, of its output

WARM_PART = 0.25  # of the time of a measurement
KINDS_PART = 0.6  # after that, the usual lengths alone
NUM_USUAL = 8  # requests with the lengths of the workload, at once
NUM_IN_FLOW = 512  # requests with these lengths, more than are answered in the time
MOST_AT_ONCE = 32
LEAST_FLOW_S = 1.0
FEW_AT_ONCE = 8  # in loads of more, requests wait for each other in the front
SET_TIMEOUT_S = 60.0
PROMPT_BYTES = 64  # of a prompt; no two begin with the same ones
NO_CHUNK = 0  # the server's own


class CalibrationLoad(NamedTuple):
    """Requests, and the longest piece of a prompt for them. `at_once`: so many are open together,
    and each of the others comes when one has ended; 0: all."""

    requests: Sequence[Pair]
    chunk: int = NO_CHUNK
    at_once: int = 0


class Shape(NamedTuple):
    """What bounds the loads."""

    rows: int  # that the server has
    longest: int  # tokens of a request
    chunk: int


def measure(
    model: str,
    options: Mapping[str, OptionValue],
    *,
    seconds: float,
    usual: tuple[Lengths, Lengths],
) -> MeasuredMachine:
    """Measure `model` served with `options`, for about `seconds` after it is ready. `usual`: the
    lengths of prompts and outputs that are planned for. Raises SettingsError."""
    words = [model, *words_of(options)] if model else words_of(options)
    with tempfile.TemporaryDirectory(prefix="weft-plan-") as folder:
        path = Path(folder) / "measured.journal"
        with measured_server(words, path) as server:
            try:
                sent = asyncio.run(_all_loads(server.url, seconds, usual))
            except HttpError as exc:
                raise SettingsError(f"the server that was measured failed: {exc}") from exc
        journal = warm(journal_of(path), sent.warm_s)
    if not journal.steps:
        raise SettingsError("the server that was measured computed no step: measure for longer")
    return measured_machine(
        journal,
        name=processor(),
        model=model,
        options=options,
        front=front_of(sent.traces, journal),
    )


def journal_of(path: Path) -> Journal:
    """Raises SettingsError if it cannot be read."""
    try:
        with JournalReader(path) as reader:
            return read_journal(reader)
    except (OSError, JournalError, BadJournal) as exc:
        raise SettingsError(f"cannot read the journal {path}: {exc}") from exc


def processor() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if named:
            return named[1]
    return platform.processor() or platform.machine()


class SentLoads(NamedTuple):
    """What was sent once the server was warm."""

    warm_s: float  # from the first request on, until it was
    traces: list[PlayedTrace]


async def _all_loads(url: str, seconds: float, usual: tuple[Lengths, Lengths]) -> SentLoads:
    """Send loads until the time is over, at least one. The first ones warm the server: memory is
    touched for the first time, and each is slower than it will be. The last ones have the usual
    lengths, for they tell the most, and how often guesses are right shows in long outputs only."""
    client = HttpClient(url)
    shape = await _shape(client)
    rng = np.random.default_rng(0)
    began = time.perf_counter()
    own_chunk = shape.chunk
    warm_s = 0.0
    found: list[PlayedTrace] = []
    kinds = itertools.cycle(calibration_loads(shape, usual, rng))
    flows = itertools.cycle(usual_flows(shape, usual, rng))
    while True:
        passed_s = time.perf_counter() - began
        if not warm_s and passed_s > WARM_PART * seconds:
            warm_s = passed_s
        if found and passed_s > seconds:
            return SentLoads(warm_s, found)
        leaves: Awaitable[object] | None = None
        if passed_s < KINDS_PART * seconds or not warm_s:
            load = next(kinds)
        else:
            load = next(flows)
            leaves = asyncio.sleep(max(seconds - passed_s, LEAST_FLOW_S))
        _set_chunk(url, load.chunk or own_chunk)
        arrivals = _arrivals(load, rng)
        played = await play(client, arrivals, leaves=leaves)
        if played.first_error:
            raise HttpError(played.first_error)
        if warm_s:
            found.append(played)


def warm(journal: Journal, warm_s: float) -> Journal:
    """The journal without the steps before this time."""
    first = bisect_left(journal.ended_s, warm_s)
    return journal._replace(steps=journal.steps[first:], ended_s=journal.ended_s[first:])


async def _shape(client: HttpClient) -> Shape:
    state = await client.get_json("/get_internal_state")
    settings = state["server_args"]
    models = await client.get_json("/v1/models")
    model = models["data"][0]
    rows = int(settings["max_running_requests"])
    longest = int(model.get("max_model_len") or 2_048)
    return Shape(rows, longest, settings["chunked_prefill_size"])


def calibration_loads(
    shape: Shape, usual: tuple[Lengths, Lengths], rng: np.random.Generator
) -> list[CalibrationLoad]:
    """Few and many rows, short and long contexts, small and large prefills, the usual lengths. The
    first ones tell the most, if there is no time for all."""
    most = min(shape.rows, MOST_AT_ONCE)
    prompts = usual[0].draw(rng, NUM_USUAL)
    outputs = usual[1].draw(rng, NUM_USUAL)
    found = [
        CalibrationLoad([(32, 24)]),
        CalibrationLoad([(250, 8)]),
        CalibrationLoad([(40 * number, 24) for number in range(1, 5)]),
        CalibrationLoad(list(zip(prompts, outputs, strict=True))),
        CalibrationLoad([(12 * number, 20) for number in range(1, most // 2 + 1)]),
        CalibrationLoad([(900, 4)]),
        CalibrationLoad([(300, 16), (20, 40), (20, 40), (300, 8)], chunk=64),
        CalibrationLoad([(500, 8), (20, 24), (400, 8)], chunk=128),
        CalibrationLoad([(10 * number, 24) for number in range(1, most + 1)]),
        CalibrationLoad([(120, 40), (60, 40)]),
        CalibrationLoad([(60, 4), (90, 4), (130, 4)]),
    ]
    return [load._replace(requests=_fitting(load.requests, shape.longest)) for load in found]


def usual_flows(
    shape: Shape, usual: tuple[Lengths, Lengths], rng: np.random.Generator
) -> list[CalibrationLoad]:
    """The usual lengths, with few and with many requests at once, for as long as there is time."""
    most = min(shape.rows, MOST_AT_ONCE)
    prompts = usual[0].draw(rng, NUM_IN_FLOW)
    outputs = usual[1].draw(rng, NUM_IN_FLOW)
    requests = _fitting(list(zip(prompts, outputs, strict=True)), shape.longest)
    return [CalibrationLoad(requests, at_once=most)]


def _fitting(requests: Sequence[Pair], longest: int) -> list[Pair]:
    """The requests, cut to a context of `longest` tokens."""
    found = []
    for prompt_len, output_len in requests:
        most_output = max(longest // 4, 1)
        short = min(output_len, most_output)
        most_prompt = max(longest - short - 1, 1)
        found.append((min(prompt_len, most_prompt), short))
    return found


def _arrivals(load: CalibrationLoad, rng: np.random.Generator) -> list[Arrival]:
    found = []
    at_once = load.at_once or len(load.requests)
    for number, (prompt_len, output_len) in enumerate(load.requests):
        ids = rng.integers(FIRST_ID, LAST_ID, prompt_len)
        prompt = ids.astype(np.int32).tobytes()
        arrival = Arrival(
            time_s=0.0,
            prompt=prompt,
            output_len=output_len,
            max_new_tokens=output_len,
            ignore_eos=True,
            after=max(number - at_once, -1),
        )
        found.append(arrival)
    return found


def _set_chunk(url: str, chunk: int) -> None:
    """Let the server cut prompts into pieces of this length; never longer than at its start."""
    settings = {"chunked_prefill_size": chunk}
    body = json.dumps({"server_args": settings}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/set_internal_state", body, headers)
    try:
        reply = urllib.request.urlopen(request, timeout=SET_TIMEOUT_S)
        reply.close()
    except OSError:
        return  # its own chunks are shorter: they stay


def front_of(played: Sequence[PlayedTrace], journal: Journal) -> FrontCost:
    """The time that requests spent outside of the engine, until their first token."""
    engine_s: dict[bytes, float] = {}
    record = journal.record
    for number, arrival in enumerate(journal.arrivals):
        if isinstance(arrival.prompt, bytes):
            took_s = record.first_s[number] - record.sent_s[number]
            name = arrival.prompt[:PROMPT_BYTES]
            engine_s[name] = float(took_s)
    lens: list[int] = []
    seconds: list[float] = []
    for trace in played:
        if len(trace.requests) > FEW_AT_ONCE:  # or a flow
            continue
        for request in trace.requests:
            name = request.prompt[:PROMPT_BYTES]
            inside_s = engine_s.get(name, math.nan)
            if not inside_s >= 0 or not request.event_s:
                continue
            ttft_s = request.event_s[0] - request.sent_s
            prompt_len = len(request.prompt) // 4
            lens.append(prompt_len)
            seconds.append(ttft_s - inside_s)
    return fit_front(lens, seconds)
