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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from weft.bench.http import HttpClient, HttpError
from weft.bench.played import PlayedRequest, PlayedTrace, play
from weft.capacity.guesses import Text
from weft.capacity.machine import (
    FrontCost,
    MeasuredMachine,
    fit_front,
    measured_machine,
    texts_of,
)
from weft.capacity.workload import FIRST_ID, LAST_ID, ChatUsers
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
KINDS_PART = 0.5  # after that, chats as they will be
NUM_USUAL = 8  # requests with the lengths of the workload, at once
NUM_CHATTED = 384  # requests of chats, more than are answered in the time
MOST_CHATTING = 16  # with more, the front is later than it is at most knees
CHAT_SEED = 1  # not the chats that are planned with
MOST_AT_ONCE = 32
ALONE_S = 0.03  # requests that come closer together wait for each other in the front
SET_TIMEOUT_S = 60.0
NO_CHUNK = 0  # the server's own


class CalibrationLoad(NamedTuple):
    """Requests that arrive at once, and the longest piece of a prompt for them."""

    requests: Sequence[Pair]
    chunk: int = NO_CHUNK


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
    users: ChatUsers,
) -> MeasuredMachine:
    """Measure `model` served with `options`, for about `seconds` after it is ready. `users`: whose
    chats are planned for. Raises SettingsError."""
    words = [model, *words_of(options)] if model else words_of(options)
    with tempfile.TemporaryDirectory(prefix="weft-plan-") as folder:
        path = Path(folder) / "measured.journal"
        with measured_server(words, path) as server:
            try:
                sent = asyncio.run(_all_loads(server.url, seconds, users))
            except HttpError as exc:
                raise SettingsError(f"the server that was measured failed: {exc}") from exc
        recorded = journal_of(path)
        journal = warm(recorded, sent.warm_s)
    if not journal.steps:
        raise SettingsError("the server that was measured computed no step: measure for longer")
    return measured_machine(
        journal,
        name=processor(),
        model=model,
        options=options,
        front=front_of(sent.traces, journal),
        texts=chatted(recorded, sent.chats_s),
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
    chats_s: float  # and until the first chat
    traces: list[PlayedTrace]


async def _all_loads(url: str, seconds: float, users: ChatUsers) -> SentLoads:
    """Send loads until the time is over, at least one. The first ones warm the server: memory is
    touched for the first time, and each is slower than it will be. Then they begin anew, so that
    the first kinds are measured on a slow machine, too. The last ones are chats of `users`, for
    they tell the most: how often guesses are right, too."""
    client = HttpClient(url)
    shape = await _shape(client)
    rng = np.random.default_rng(0)
    began = time.perf_counter()
    warm_s = 0.0
    found: list[PlayedTrace] = []
    kinds = calibration_loads(shape, (users.prompt, users.output), rng)
    loads = itertools.cycle(kinds)
    while True:
        passed_s = time.perf_counter() - began
        if not warm_s and passed_s > WARM_PART * seconds:
            warm_s = passed_s
            loads = itertools.cycle(kinds)
        if found and passed_s > KINDS_PART * seconds:
            break
        load = next(loads)
        _set_chunk(url, load.chunk or shape.chunk)
        played = await play(client, _at_once(load.requests, rng))
        _check(played)
        if warm_s:
            found.append(played)
    chats_s = time.perf_counter() - began
    if chats_s < seconds:
        _set_chunk(url, shape.chunk)
        chats = replace(users, think_s=0.0, context_length=shape.longest, seed=CHAT_SEED)
        arrivals = replace(chats, requests=NUM_CHATTED).arrivals(min(shape.rows, MOST_CHATTING))
        played = await play(client, arrivals, leaves=asyncio.sleep(seconds - chats_s))
        _check(played)
        found.append(played)
    return SentLoads(warm_s, chats_s, found)


def _check(played: PlayedTrace) -> None:
    """Raises HttpError."""
    if played.first_error:
        raise HttpError(played.first_error)


def chatted(journal: Journal, chats_s: float) -> list[Text]:
    """The texts of the chats, which came after this time; all texts if there were none."""
    arrivals = [one for one in journal.arrivals if one.time_s >= chats_s]
    return texts_of(arrivals or journal.arrivals)


def warm(journal: Journal, warm_s: float) -> Journal:
    """The journal without the steps before this time."""
    first = bisect_left(journal.ended_s, warm_s)
    return journal._replace(steps=journal.steps[first:], ended_s=journal.ended_s[first:])


async def _shape(client: HttpClient) -> Shape:
    state = await client.get_json("/get_internal_state")
    settings = state["server_args"]
    model = await client.first_model()
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


def _fitting(requests: Sequence[Pair], longest: int) -> list[Pair]:
    """The requests, cut to a context of `longest` tokens."""
    found = []
    for prompt_len, output_len in requests:
        most_output = max(longest // 4, 1)
        short = min(output_len, most_output)
        most_prompt = max(longest - short - 1, 1)
        found.append((min(prompt_len, most_prompt), short))
    return found


def _at_once(requests: Sequence[Pair], rng: np.random.Generator) -> list[Arrival]:
    found = []
    for prompt_len, output_len in requests:
        ids = rng.integers(FIRST_ID, LAST_ID, prompt_len)
        prompt = ids.astype(np.int32).tobytes()
        arrival = Arrival(
            time_s=0.0,
            prompt=prompt,
            output_len=output_len,
            max_new_tokens=output_len,
            ignore_eos=True,
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
    """The time that requests spent outside of the engine, until their first token. Only those count
    that came alone."""
    engine_s: dict[bytes, float] = {}
    record = journal.record
    for number, arrival in enumerate(journal.arrivals):
        if isinstance(arrival.prompt, bytes):
            took_s = record.first_s[number] - record.sent_s[number]
            engine_s[arrival.prompt] = float(took_s)
    lens: list[int] = []
    seconds: list[float] = []
    for trace in played:
        for request in alone(trace.requests):
            inside_s = engine_s.get(request.prompt, math.nan)
            if not inside_s >= 0 or not request.event_s:
                continue
            ttft_s = request.event_s[0] - request.sent_s
            prompt_len = len(request.prompt) // 4
            lens.append(prompt_len)
            seconds.append(ttft_s - inside_s)
    return fit_front(lens, seconds)


def alone(requests: Sequence[PlayedRequest]) -> list[PlayedRequest]:
    """The requests that were sent at another time than all others."""
    sent = sorted((one for one in requests if one.prompt), key=lambda one: one.sent_s)
    times_s = [-math.inf, *(one.sent_s for one in sent), math.inf]
    pauses_s = np.diff(times_s)
    return [
        one
        for one, before_s, after_s in zip(sent, pauses_s, pauses_s[1:], strict=False)
        if min(before_s, after_s) >= ALONE_S
    ]
