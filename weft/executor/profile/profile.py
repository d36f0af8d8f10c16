"""The torch profiler around the steps of a runner: a table of what took most, and a trace for
chrome://tracing.

Where our kernels compute on a CPU, a step is one call of their library, and torch sees nothing of
it: they note the times of their operations themselves (`ops/cpp/timing.py`), and the report puts
these among torch's.

Requests are served meanwhile. Before the first recording torch imports its compiler, which takes
seconds on a busy machine: a thread of its own does that. Recording slows steps down a little; when
it ends, torch holds everything up for about 10 µs for each event (weft-nano has 1,600 in a step);
the rest is done by a process of its own (`report.py`). Recording ends by itself after
`MAX_PROFILED_STEPS`: all events are kept in memory until then.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from torch.profiler import ProfilerActivity, profile

from weft.config.numbers import MAX_PROFILED_STEPS
from weft.config.process import module_command
from weft.executor.runner import TorchRunner
from weft.ops.cpp.library import Library
from weft.ops.cpp.timing import Span, Timings

REPORT = module_command("weft.executor.profile.report")
REPORT_TIMEOUT_S = 300.0
ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def import_compiler() -> None:
    """What torch's profiler imports when it is prepared for the first time: 1.2 s of a
    processor."""
    importlib.import_module("torch._inductor.config")


@dataclass(frozen=True)
class ProfileState:
    """The progress of the last profile, and its results."""

    state: Literal["none", "writing", "done", "failed"]
    num_steps: int = 0
    trace: str = ""  # below the folder that the profiler was given
    table: str = ""
    message: str = ""


class RunnerProfiler:
    """Profiles the steps of a runner. While it does not record, no step enters it.

    `root` is the folder below which traces are written; without it none are. `start` and `stop` are
    called by the thread that launches; neither waits for the device, nor for `prepare`, which is
    called once.
    """

    def __init__(
        self,
        runner: TorchRunner,
        root: Path | None,
        *,
        has_gpu: bool,
        prepare: Callable[[], None] = import_compiler,
    ) -> None:
        self._runner = runner
        self._root = root
        self._activities = dict(ACTIVITIES)
        if not has_gpu:
            del self._activities["GPU"]
        self._preparation = Preparation(prepare)
        self._numbers = itertools.count(1)
        self._report = ProfileState("none", message="nothing was recorded yet")
        self._recording: _Recording | None = None

    def start(
        self,
        *,
        num_steps: int | None,
        activities: Sequence[str],
        record_shapes: bool,
        with_stack: bool,
        profile_memory: bool,
        folder: str,
        prefix: str,
    ) -> str | None:
        """Record from the next step that is launched, `num_steps` of them, or until `stop`.

        Returns where the trace will lie, below the root; nothing without a root; None while all is
        being prepared: call again. Raises ValueError for what cannot be.
        """
        if self._recording is not None:
            raise ValueError("the profiler is recording already; stop_profile ends that")
        if self._report.state == "writing":
            raise ValueError("the last profile is still being written")
        if num_steps is not None and not 1 <= num_steps <= MAX_PROFILED_STEPS:
            raise ValueError(f"num_steps is {num_steps}; 1 to {MAX_PROFILED_STEPS} is expected")
        unknown = [name for name in activities if name not in self._activities]
        if unknown:
            raise ValueError(
                f"activities has {unknown[0][:64]!r}; this device has {', '.join(self._activities)}"
            )
        place = self._place(folder, prefix)
        if not self._preparation.is_done():
            return None
        trace = None
        if place is not None:
            trace = place / self._file_name(prefix)
        # Torch's tracer would report its starts and stops on standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        profiler = profile(
            activities=[self._activities[name] for name in activities or self._activities],
            record_shapes=record_shapes,
            with_stack=with_stack,
            profile_memory=profile_memory,
        )
        profiler.prepare_trace()
        kernels = None
        if not activities or "CPU" in activities:
            kernels = self._runner.kernels
        recording = _Recording(profiler, trace, num_steps or MAX_PROFILED_STEPS, kernels)
        # Torch records the thread on which the profiler was started.
        recording.started = self._runner.submit(recording.begin)
        self._recording = recording
        self._runner.on_launch = self._count
        return self._name(trace)

    def stop(self) -> ProfileState:
        """Stop, if it still records. Call again while the report is being written."""
        if self._recording is not None:
            self._finish(self._recording)
        return self._report

    def _count(self) -> None:
        """A step has been launched."""
        recording = self._recording
        assert recording is not None, "a step is counted while nothing is recorded"
        recording.num_steps += 1
        if recording.num_steps == recording.max_steps:
            self._finish(recording)

    def _finish(self, recording: _Recording) -> None:
        """Nothing more is recorded than what has been launched."""
        self._recording = None
        self._runner.on_launch = None
        self._report = ProfileState("writing", recording.num_steps, self._name(recording.trace))
        stopped = self._runner.submit(recording.end)
        writer = threading.Thread(
            target=self._write,
            args=(recording, stopped),
            name="weft-profile",
            daemon=True,
        )
        writer.start()

    def _write(self, recording: _Recording, stopped: Future[None]) -> None:
        trace = self._name(recording.trace)
        try:
            recording.started.result()
            stopped.result()
            self._report = ProfileState(
                "done",
                recording.num_steps,
                trace,
                recording.table(),
            )
        except Exception as exc:  # of torch, or of a full disk: for whoever asks
            reason = getattr(exc, "strerror", "") or exc
            message = f"the profile could not be made: {type(exc).__name__}: {reason}"
            self._report = ProfileState("failed", recording.num_steps, message=message)

    def _place(self, folder: str, prefix: str) -> Path | None:
        """The folder for the next trace. Raises ValueError for a place that is not below the
        root."""
        if prefix and not PREFIX.fullmatch(prefix):
            raise ValueError(
                f"the prefix is {prefix[:64]!r}; "
                "up to 64 letters, digits, dots and dashes are expected"
            )
        if self._root is None:
            if folder:
                raise ValueError("no trace is written, because the server has no --profile-dir")
            return None
        root = self._root.resolve()
        outside = ValueError(f"the folder is {folder[:200]!r}, which is not below --profile-dir")
        try:
            target = (root / folder).resolve()
            if not target.is_relative_to(root):
                raise outside
            target.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as exc:
            raise ValueError(
                f"the folder {folder[:200]!r} cannot be used: {getattr(exc, 'strerror', exc)}"
            ) from exc
        return target

    def _file_name(self, prefix: str) -> str:
        started = time.strftime("%Y%m%d-%H%M%S")
        return f"{prefix or 'weft'}-{started}-{next(self._numbers)}.trace.json.gz"

    def _name(self, trace: Path | None) -> str:
        if trace is None or self._root is None:
            return ""
        return str(trace.relative_to(self._root.resolve()))


class Preparation:
    """`work`, done once, in a thread of its own from the first call of `is_done`."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(
            target=work,
            name="weft-profile",
            daemon=True,
        )

    def is_done(self) -> bool:
        if self._thread.ident is None:
            self._thread.start()
        return not self._thread.is_alive()


@dataclass
class _Recording:
    """A profile that is being made."""

    profiler: profile
    trace: Path | None
    max_steps: int
    kernels: Library | None  # that are to note the times of their operations
    started: Future[None] = field(default_factory=Future)
    num_steps: int = 0
    timings: Timings = field(default_factory=Timings)

    def begin(self) -> None:
        """Runs on the thread that runs steps."""
        if self.kernels is not None:
            self.kernels.timings = self.timings
        self.profiler.start_trace()

    def end(self) -> None:
        """Also runs on the thread that runs steps."""
        if self.kernels is not None:
            self.kernels.timings = None
        self.profiler.stop_trace()

    def table(self) -> str:
        """The operations that took most time of their own. Leaves the trace where it is to lie."""
        with tempfile.TemporaryDirectory(prefix="weft-profile-") as folder:
            raw = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(raw))
            spans = Path(folder) / "spans.json"
            spans.write_bytes(msgspec.json.encode(self.spans()))
            command = [*REPORT, str(raw), str(spans)]
            if self.trace is not None:
                command.append(str(self.trace))
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=REPORT_TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                raise RuntimeError(
                    f"the report was not written within {REPORT_TIMEOUT_S:g} s"
                ) from None
        if done.returncode:
            raise RuntimeError(
                f"the report ended with {done.returncode}: {_last_line(done.stderr)}"
            )
        return done.stdout

    def spans(self) -> list[Span]:
        """The spans that the kernels recorded, on the clock of the trace: nanoseconds since
        1970."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        return [span._replace(began_ns=span.began_ns + offset_ns) for span in self.timings.spans()]


def _last_line(text: str) -> str:
    """The text of a traceback's exception, without its paths."""
    lines = text.strip().splitlines()
    if not lines:
        return ""
    return lines[-1].partition(": '/")[0]
