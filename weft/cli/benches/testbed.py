"""A loaded model to run traces on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.assemble.checkpoint import check_files
from weft.config.engine import EngineConfig
from weft.config.machine import probe
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.resolve import resolve
from weft.engine.engine import Engine
from weft.executor.weights.fetch import local_folder
from weft.grammar.protocol import Grammars
from weft.plan.step import Runner
from weft.scheduler.settings import SchedulerSettings
from weft.sim.measured import MeasuredRunner, RealClock, StepTime
from weft.sim.run import REFUSED, Record, Run
from weft.sim.trace import Arrival, TokenSource

MAX_KEYS = 100_000  # prompts of one run; those of another share no prefix with them


class Testbed:
    """A loaded model, and an engine of its own for each run over it: nothing is cached, nothing has been counted."""

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
        """Load a model. With random weights (--load-format dummy) a folder with a config.json will do."""
        from weft.assemble.build import build_engine

        folder = local_folder(config.model, config.revision)
        if config.load_format != "dummy":
            check_files(folder)
        model = ModelConfig.from_folder(folder, Path(config.model).name)
        resolved = resolve(config, model, probe()).config
        built = build_engine(resolved, folder)
        settings = built.engine.scheduler.settings
        summary = built.ready.model_summary
        return cls(
            built.runner,
            settings,
            overlap=bool(resolved.overlap),
            summary=summary,
            threads=resolved.threads,
        )

    @property
    def new_key(self) -> int:
        """First key for a trace whose prompts share nothing with those of earlier ones."""
        return next(self._keys)

    def engine(self, grammars: Grammars, **changed: Any) -> Engine:
        """One whose requests may have grammars, with some of the scheduler's settings changed."""
        settings, clock = replace(self.settings, **changed), RealClock()
        return Engine(
            settings,
            self._runner,
            clock=clock,
            overlap=self.overlap,
            on_failure=_fail,
            grammars=grammars,
        )

    def play(self, arrivals: Iterable[Arrival], **changed: Any) -> Record:
        """Run a trace in real time, with some of the scheduler's settings changed."""
        settings, clock = replace(self.settings, **changed), RealClock()
        runner = MeasuredRunner(self._runner)
        engine = Engine(settings, runner, clock=clock, overlap=self.overlap, on_failure=_fail)
        record = Run(engine, clock, TokenSource(settings.vocab_size)).play(arrivals)
        if (record.state == REFUSED).any():
            longest = int((record.prompt_len + record.output_len).max())
            raise SettingsError(
                f"requests were refused: prompt and completion together may have {engine.scheduler.max_len:,} tokens "
                f"here (--context-length, --kv-tokens); a prompt has {longest:,}"
            )
        record.meter, record.num_rows = runner.meter, settings.max_running_requests
        self.steps += runner.steps
        return record


def _fail(exc: Exception) -> None:
    raise exc
