"""Runs the phases against a server, does to its engine what a phase says, and audits after each."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.e2e.media_models import smolvlm
from tests.e2e.server import Server
from tests.soak import behaviour
from tests.soak.answers import Answers, ask_again
from tests.soak.audit import SETTLE_S, Audit, golden, settled
from tests.soak.http import Lost, call
from tests.soak.ledger import Wrong
from tests.soak.phases import KILL, PHASES, PICTURES, Phase, arrivals
from tests.soak.publishers import make_adapters
from tests.soak.world import World

BUNDLED = Path(__file__).parents[2] / "weft" / "bundled" / "weft-nano"
OPTIONS = (
    *("--dtype", "float32", "--max-queued-requests", "40", "--session-timeout-s", "2"),
    *("--stall-timeout-s", "2", "--body-timeout-s", "3", "--max-pending-tokens", "256"),
    *(
        "--kv-tokens",
        "3072",
        "--chunked-prefill-size",
        "256",
        "--schedule-conservativeness",
        "0.1",
    ),  # retractions, chunks
)
MUST_HAPPEN = (
    "total_retractions",
    "total_evicted_tokens",
    "total_cached_tokens",
)  # else a run shows little
MIN_LOAD_S = 80.0  # of a server that must have seen them, however long that takes
ASK_AGAIN = 0.4  # of the seconds of a phase
MAX_SIDE_BY_SIDE = 64  # behaviours; who comes beyond that waits here, not in the server
HEALTH_INTERVAL_S = 0.5
HEALTH_TIMEOUT_S = 90.0
END_S = 240.0  # for a server whose engine was killed to end
WARM_UP_S = 4.0
MAX_ROUNDS = 20
SEEING = -1  # the number of the server whose model takes pictures
SEEING_CONTEXT = 4_096  # tokens, which are bytes for that model


@dataclass
class PhaseFigures:
    """What happened in a phase."""

    name: str
    server: int  # the first is 0; after each kill there is another; `SEEING`: it takes pictures
    seconds: float
    sent: int
    ends: dict[str, int]
    tokens: int
    slowest_health_s: float
    audit: Audit | None
    asked_again: int = 0  # answers that were compared with what an idle server says


@dataclass
class Report:
    seed: int
    phases: list[PhaseFigures] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_faults: int = 0

    def fault(self, told: str) -> None:
        self.faults.append(told)
        self.num_faults += 1
        print(f"fault: {told}", file=sys.stderr, flush=True)


class Life:
    """One server, from its start to its end."""

    def __init__(
        self,
        report: Report,
        number: int,
        model: str,
        options: Sequence[str],
        scale: float,
        *,
        plant: Sequence[str] = (),
        settle_s: float = SETTLE_S,
    ) -> None:
        """`plant`: a fault of `plants.py`, and how often it does wrong. `settle_s`: for an audit to
        find nothing."""
        self._settle_s = settle_s
        self._report = report
        self._scale = scale
        self._number = number
        module = ("tests.soak.plants", *plant) if plant else ("weft",)
        self._server = Server(*OPTIONS, *options, model or "weft-nano", module=module)
        self._began = time.monotonic()
        self._load_s = 0.0
        self._front = psutil.Process(self._server.process.pid)
        self._port = int(self._server.url.rpartition(":")[2])
        self._folder = str(Path(model).resolve() if model else BUNDLED)
        self._golden: dict[str, str] = {}
        self._baseline: Audit | None = None
        self._num_lines = 0

    async def warm_up(
        self,
        seed: str,
        known: dict[str, str],
        seconds: float,
        phases: Sequence[Phase] = PHASES[:-1],
    ) -> dict[str, str]:
        """Bring it to the state that it must come back to, with load for so long.

        `known`: the continuations of the server before, if any.
        """
        self._golden = await golden(self._port)
        if known and known != self._golden:
            self._report.fault("a new server continues greedily in another way")
        if seconds:
            for phase in phases:
                await self._load(
                    phase, max(1.0, seconds / len(phases)), f"{seed}/warm-up/{phase.name}"
                )
            await self._load_profiler(random.Random(f"{seed}/profiler"))
        self._baseline = await self._audit("warm-up", None)
        return self._golden

    async def run(self, phase: Phase, seconds: float, seed: str) -> None:
        figures = await self._load(phase, seconds, seed)
        try:
            await self._examine(phase, figures, seconds, seed)
        except Wrong as exc:  # the server cannot even be asked
            self._report.fault(f"after {phase.name}: {exc}")

    async def _examine(
        self, phase: Phase, figures: PhaseFigures, seconds: float, seed: str
    ) -> None:
        """Look at the idle server behind a phase: its books, its answers, its log."""
        figures.audit = await self._audit(phase.name, self._baseline)
        await self._ask_again(figures, seconds * ASK_AGAIN, seed)
        if await golden(self._port) != self._golden:
            self._report.fault(f"after {phase.name} greedy text is another")
        bad = [
            line
            for line in self._new_lines()
            if "Traceback" in line or (" error " in line and not phase.fault)
        ]
        for line in bad:
            self._report.fault(f"{phase.name}: the log says {line[:300]}")

    async def kill(self, phase: Phase, seconds: float, seed: str) -> None:
        """The engine is killed in the middle of it; everybody must be told, and the server must end
        with the reason."""
        await self._load(phase, seconds, seed)
        try:
            status = await asyncio.to_thread(self._server.process.wait, END_S)
        except Exception:
            self._report.fault("kill: the server goes on without its engine")
        else:
            if status == 0 or "kill" not in " ".join(self._server.lines[-3:]):
                self._report.fault(
                    f"kill: the server ends with {status} and the words {self._server.lines[-1]!r}"
                )
        if any("Traceback" in line for line in self._new_lines()):
            self._report.fault("kill: there is a traceback in the log")

    def stop(self) -> None:
        """End it as a user does; status 0 is expected unless it has ended before."""
        ended = self._server.process.poll() is not None
        if self._server.stop() != 0 and not ended:
            self._report.fault("the server does not end with status 0")

    async def _load_profiler(self, rng: random.Random) -> None:
        """Let the engine load its profiler, which takes memory and a thread that it keeps."""
        world = self._world(PHASES[0], "profiler")
        await asyncio.gather(
            behaviour.profile(world, rng), *(behaviour.ask(world, rng) for _ in range(3))
        )
        self._report.faults += world.ledger.faults
        self._report.num_faults += world.ledger.num_faults

    async def _ask_again(self, figures: PhaseFigures, seconds: float, seed: str) -> None:
        compared, differences = await ask_again(self._port, self._answers, seconds, f"again-{seed}")
        figures.asked_again = compared
        for difference in differences:
            self._report.fault(f"{figures.name}: {difference}")

    async def must_have_happened(self) -> None:
        """A run that has seen no retraction shows nothing about retractions."""
        if self._load_s < MIN_LOAD_S:
            return
        _, answer = await call(self._port, "GET", "/server_info")
        stats = json.loads(answer)["internal_states"][0]["stats"]
        for name in MUST_HAPPEN:
            if not stats.get(name):
                self._report.fault(f"{name} is 0: the load is not what it is meant to be")

    def _world(self, phase: Phase, seed: str) -> World:
        self._answers = Answers(random.Random(f"{seed}/answers"))
        return World(
            self._port,
            self._folder,
            self._golden,
            self._answers,
            self._server.engine.pid,
            phase.may,
            scale=self._scale,
        )

    async def _load(self, phase: Phase, seconds: float, seed: str) -> PhaseFigures:
        world = self._world(phase, seed)
        self._load_s += seconds
        began = time.monotonic()
        slowest = [0.0]
        health = asyncio.ensure_future(self._watch_health(world, phase, slowest))
        fault = asyncio.ensure_future(
            self._do(phase, world, seconds, random.Random(f"{seed}/fault"))
        )
        gate = asyncio.Semaphore(MAX_SIDE_BY_SIDE)
        work = []
        for arrival in arrivals(phase, seconds, seed):
            await asyncio.sleep(max(0.0, began + arrival.at_s - time.monotonic()))
            await gate.acquire()
            task = asyncio.ensure_future(arrival.who(world, random.Random(arrival.seed)))
            task.add_done_callback(lambda _: gate.release())
            work.append(task)
        for outcome in await asyncio.gather(*work, fault, return_exceptions=True):
            if isinstance(outcome, BaseException):
                world.ledger.fault(f"the driver itself: {outcome!r}")
        health.cancel()
        await asyncio.gather(health, return_exceptions=True)
        return self._booked(phase, world, time.monotonic() - began, slowest[0])

    def _booked(self, phase: Phase, world: World, seconds: float, slowest_s: float) -> PhaseFigures:
        ledger = world.ledger
        if ledger.num_open:
            ledger.fault(f"{ledger.num_open} requests have no end")
        self._report.kinds += ledger.kinds
        self._report.num_faults += ledger.num_faults
        self._report.faults += [f"{phase.name}: {told}" for told in ledger.faults]
        for told in ledger.faults:
            print(f"fault: {phase.name}: {told}", file=sys.stderr, flush=True)
        figures = PhaseFigures(
            phase.name,
            self._number,
            round(seconds, 1),
            ledger.num_sent,
            dict(ledger.ends.most_common()),
            ledger.num_tokens,
            round(slowest_s, 3),
            None,
        )
        self._report.phases.append(figures)
        told = f"server {self._number}: {phase.name}, {figures.sent} requests, {self._report.num_faults} faults so far"
        print(told, file=sys.stderr, flush=True)
        return figures

    async def _do(self, phase: Phase, world: World, seconds: float, rng: random.Random) -> None:
        """What happens to the engine."""
        if phase.fault == "kill":
            await asyncio.sleep(seconds / 2)
            world.ledger.killed_at = time.monotonic()
            world.may |= {"500", "502", "503", "abort"}
            os.kill(world.engine_pid, signal.SIGKILL)
        elif phase.fault == "stop":
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                await asyncio.sleep(min(seconds / 4, 3.0) * rng.random())
                os.kill(world.engine_pid, signal.SIGSTOP)
                await asyncio.sleep(min(seconds / 2, rng.uniform(0.5, 7.0)))
                os.kill(world.engine_pid, signal.SIGCONT)
                await asyncio.sleep(1.0)

    async def _watch_health(self, world: World, phase: Phase, slowest: list[float]) -> None:
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    status, _ = await call(world.port, "GET", "/health")
            except TimeoutError:
                world.ledger.fault(f"/health has not answered for {HEALTH_TIMEOUT_S:g} s")
            except (Lost, OSError) as exc:
                if phase.fault != "kill":
                    world.ledger.fault(f"/health: {exc!r}")
            else:
                if status != 200 and not phase.fault:
                    world.ledger.fault(f"/health answers {status}")
            slowest[0] = max(slowest[0], time.monotonic() - began)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _audit(self, after: str, baseline: Audit | None) -> Audit:
        found = await settled(
            self._port,
            after,
            self._began,
            self._front,
            self._server.engine,
            baseline,
            self._settle_s,
        )
        for fault in found.faults(baseline):
            self._report.fault(fault)
        return found

    def _new_lines(self) -> list[str]:
        found = self._server.lines[self._num_lines :]
        self._num_lines += len(found)
        return found


async def soak(
    minutes: float,
    seed: int,
    model: str = "",
    options: Sequence[str] = (),
    phase_s: float = 20.0,
    scale: float = 1.0,
) -> Report:
    """Phases in turn for so long. The engine is killed after the first round, and in the end.

    A round of phases is begun anew until the time is over, so each of them has run at least once.
    """
    report = Report(seed)
    until = time.monotonic() + minutes * 60
    phase_s = min(phase_s, minutes * 60 / (len(PHASES) + 3))
    with tempfile.TemporaryDirectory() as folder:
        adapters = Path(folder) / "adapters"
        make_adapters(adapters)
        options = ("--enable-lora", "--lora-dir", str(adapters), *options)
        await _soak_pictures(report, Path(folder) / "seeing", f"{seed}/pictures", phase_s)
        await _soak_rounds(report, until, seed, model, options, phase_s, scale)
    return report


async def _soak_pictures(report: Report, folder: Path, seed: str, phase_s: float) -> None:
    """Pictures for a small random model that takes them, beside its text."""
    await asyncio.to_thread(smolvlm, folder, SEEING_CONTEXT)
    life = Life(report, SEEING, str(folder), (), 1.0)
    try:
        await life.warm_up(seed, {}, phase_s, [PICTURES])
        await life.run(PICTURES, phase_s, seed)
        await life.run(PICTURES, phase_s, f"{seed}/again")
    finally:
        life.stop()


async def _soak_rounds(
    report: Report,
    until: float,
    seed: int,
    model: str,
    options: Sequence[str],
    phase_s: float,
    scale: float,
) -> None:
    known: dict[str, str] = {}
    round_ = 0
    lives = 0
    while True:
        life = Life(report, lives, model, options, scale)
        lives += 1
        try:
            known = await life.warm_up(f"{seed}/{lives}", known, min(WARM_UP_S * 3, phase_s * 2))
            while True:
                for phase in PHASES:
                    if round_ and time.monotonic() > until:
                        break
                    await life.run(phase, phase_s, f"{seed}/{round_}/{phase.name}")
                round_ += 1
                if round_ == 1 or time.monotonic() > until:
                    break
            await life.must_have_happened()
            await life.kill(KILL, min(phase_s, 6.0), f"{seed}/{round_}/kill")
        finally:
            life.stop()
        if time.monotonic() > until:
            return


async def soak_planted(
    name: str, every: int, phase: Phase, seconds: float, *, seed: int = 1, rounds: int = MAX_ROUNDS
) -> Report:
    """Rounds of one phase on a server with a fault planted (tests/soak/plants.py), until the report
    tells of it.

    How many that takes depends on the speed of the machine; after all of `rounds` nothing will come
    any more.
    """
    report = Report(seed)
    life = Life(report, 0, "", (), 1.0, plant=(name, str(every)), settle_s=3.0)
    try:
        await life.warm_up(f"{seed}/{name}", {}, 0.0)
        for round_ in range(rounds):
            await life.run(phase, seconds, f"{seed}/{name}/{round_}")
            if report.num_faults:
                break
    finally:
        life.stop()
    return report
