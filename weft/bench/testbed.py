"""A loaded model that runs traces, and the measurement of its steps.

A step is assumed to run from its launch, or from the end of the previous step if that is later,
until its result is available. This is exact while the caller waits for the result, which the loop
does if the device is the bottleneck. This module does not know what the runs are compared for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from weft.assemble.checkpoint import check_files
from weft.assemble.model_config import choose_model
from weft.assemble.model_folder import model_folder
from weft.config.engine import EngineConfig
from weft.config.machine import probe
from weft.config.options import SettingsError
from weft.config.resolve import resolve
from weft.engine.engine import Engine
from weft.grammar.protocol import Grammars
from weft.plan.device import DeviceRequest, Pending
from weft.plan.step import Plan, Result, Runner, Step
from weft.scheduler.pace.step_cost import StepLoad
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import StepMeter, decode_rows_of
from weft.sim.fit import StepTime
from weft.sim.outcome import REFUSED
from weft.sim.run import Around, EngineTarget, Record, Run, SteppableEngine
from weft.sim.trace import Arrival, TokenSource
from weft.weights.known import NANO

MAX_KEYS = 100_000  # prompts of one run; prompts of different runs share no prefix


class RealClock:
    """The clock of this machine, in seconds."""

    def __call__(self) -> float:
        return time.perf_counter()

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - time.perf_counter()))


class MeasuredStep:
    """A step whose end is recorded when its result is taken."""

    def __init__(
        self,
        runner: MeasuredRunner,
        step: Step,
        load: StepLoad,
        decode_rows: int,
        launched_s: float,
    ) -> None:
        self._runner = runner
        self._step = step
        self._load = load
        self._decode_rows = decode_rows
        self._launched_s = launched_s

    def result(self) -> Result:
        result = self._step.result()
        self._runner.note(self._load, self._decode_rows, self._launched_s)
        return result

    def done(self) -> bool:
        return self._step.done()


class MeasuredRunner:
    """Passes plans to another runner, and records the durations of their steps."""

    def __init__(self, runner: Runner) -> None:
        self.meter = StepMeter()
        self.steps: list[StepTime] = []
        self._runner = runner
        self._last_end_s = 0.0

    def launch(self, plan: Plan) -> MeasuredStep:
        # The clock is read before the launch, because a runner may compute in it.
        launched_s = time.perf_counter()
        step = self._runner.launch(plan)
        return MeasuredStep(self, step, StepLoad.of(plan), decode_rows_of(plan), launched_s)

    def control(self, request: DeviceRequest) -> Pending:
        return self._runner.control(request)

    def note(self, load: StepLoad, decode_rows: int, launched_s: float) -> None:
        """Record a step that has just ended."""
        now = time.perf_counter()
        seconds = now - max(launched_s, self._last_end_s)
        self._last_end_s = now
        self.meter.add(decode_rows, seconds)
        self.steps.append(StepTime(load.tokens, load.context, load.samples, seconds, load.pairs))


def with_model(config: EngineConfig) -> EngineConfig:
    """The settings with the bundled model, if they name none."""
    return replace(config, model=config.model or NANO)


class Testbed:
    """A loaded model, and a new engine for each run on it, with an empty cache and zeroed
    counters."""

    def __init__(
        self,
        runner: Runner,
        settings: SchedulerSettings,
        *,
        overlap: bool,
        summary: str,
        threads: int = 1,
    ) -> None:
        self.threads = threads
        self.settings = settings
        self.overlap = overlap
        self.summary = summary
        self.steps: list[StepTime] = []  # of all runs
        self._runner = runner
        self._keys = itertools.count(step=MAX_KEYS)

    @classmethod
    def of(cls, config: EngineConfig) -> Testbed:
        """Load a model; the bundled one if none is named, so that figures can be compared. With
        random weights (--load-format dummy), a folder with a config.json suffices."""
        from weft.assemble.build import build_engine

        config = with_model(config)
        folder = model_folder(config)
        if config.load_format != "dummy":
            check_files(folder)
        model = choose_model(config, folder)
        resolved = resolve(config, model, probe()).config
        built = build_engine(resolved, folder)
        return cls(
            built.runner,
            built.engine.scheduler.settings,
            overlap=bool(resolved.overlap),
            summary=built.ready.model_summary,
            threads=resolved.threads,
        )

    @property
    def new_key(self) -> int:
        """The first key for a trace whose prompts share no prefix with those of earlier traces."""
        return next(self._keys)

    def engine(self, grammars: Grammars, **changed: Any) -> Engine:
        """An engine with `grammars`, and with some of the scheduler's settings changed."""
        return Engine(
            replace(self.settings, **changed),
            self._runner,
            clock=RealClock(),
            overlap=self.overlap,
            on_failure=_fail,
            grammars=grammars,
        )

    def play(
        self,
        arrivals: Iterable[Arrival],
        *,
        around: Around | None = None,
        **changed: Any,
    ) -> Record:
        """Run a trace in real time, with some of the scheduler's settings changed, and optionally
        with a wrapper `around` the engine.

        Raises SettingsError if a request does not fit into the context or the KV cache.
        """
        settings = replace(self.settings, **changed)
        clock = RealClock()
        runner = MeasuredRunner(self._runner)
        engine = Engine(settings, runner, clock=clock, overlap=self.overlap, on_failure=_fail)
        steppable: SteppableEngine = engine
        if around is not None:
            steppable = around(engine, clock)
        target = EngineTarget(steppable, clock)
        record = Run(target, TokenSource(settings.vocab_size)).play(arrivals)
        if (record.state == REFUSED).any():
            longest = int((record.prompt_len + record.output_len).max())
            raise SettingsError(
                "requests were refused: prompt and completion together may have "
                f"{engine.scheduler.limits.max_len:,} tokens here (--context-length, --kv-tokens); "
                f"a prompt has {longest:,}"
            )
        record.machine.meter = runner.meter
        record.machine.num_rows = settings.max_running_requests
        self.steps += runner.steps
        return record


def _fail(exc: Exception) -> None:
    raise exc
