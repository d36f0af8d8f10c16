"""Runs the torch profiler around the steps of a runner: the result is a table of the operations
that took most time, and a trace for chrome://tracing.

With weft's kernels on a CPU, a step is one call of their library, into which torch cannot see. So
the kernels record the times of their operations themselves (`ops/cpp/timing.py`), and the report
merges these with torch's.

Requests are served meanwhile. Before the first recording torch imports its compiler, which takes
seconds on a busy machine, so a separate thread does that. Recording slows steps down a little. When
it ends, torch blocks the whole process for about 10 µs per event (weft-nano has 1,600 in a step); a
separate process does the rest (`report.py`). Recording stops after at most `MAX_PROFILED_STEPS`
steps, because all events are kept in memory until then.
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
    """Import the modules that torch's profiler imports when it is first prepared: 1.2 s of
    processor time."""
    importlib.import_module("torch._inductor.config")


@dataclass(frozen=True)
class ProfileState:
    """The progress of the last profile, and its results."""

    state: Literal["none", "writing", "done", "failed"]
    num_steps: int = 0
    trace: str = ""  # path of the trace, relative to the profiler's root
    table: str = ""
    message: str = ""


class RunnerProfiler:
    """Profiles the steps of a runner. While it does not record, steps do not call it.

    `root`: the folder for traces; None: no traces are written. The thread that launches steps calls
    `start` and `stop`. Neither waits for the device, nor for `prepare`, which runs once on another
    thread.
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
        """Record the next `num_steps` launched steps; None: until `stop`.

        Returns the path of the future trace, relative to the root; "" without a root; None while
        the profiler is being prepared: call again. Raises ValueError for invalid arguments, or if a
        profile is being recorded or written.
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
        run_folder = self._folder_of_run(folder, prefix)
        if not self._preparation.is_done():
            return None
        trace = None
        if run_folder is not None:
            trace = run_folder / self._file_name(prefix)
        # Keeps torch's tracer from reporting its starts and stops on standard error.
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
        # On the thread that runs steps, because torch records the thread that starts the profiler.
        recording.started = self._runner.submit(recording.begin)
        self._recording = recording
        self._runner.on_launch = self._count
        return self._name(trace)

    def stop(self) -> ProfileState:
        """Stop recording, if it has not stopped. Returns the state; call again while the report is
        being written."""
        if self._recording is not None:
            self._finish(self._recording)
        return self._report

    def _count(self) -> None:
        """Count a launched step, and finish after the last one."""
        recording = self._recording
        assert recording is not None, "a step is counted while nothing is recorded"
        recording.num_steps += 1
        if recording.num_steps == recording.max_steps:
            self._finish(recording)

    def _finish(self, recording: _Recording) -> None:
        """End the recording after the steps that have been launched, and begin the report."""
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
        except Exception as exc:  # errors of torch, or a full disk: reported by `stop`
            reason = getattr(exc, "strerror", "") or exc
            message = f"the profile could not be made: {type(exc).__name__}: {reason}"
            self._report = ProfileState("failed", recording.num_steps, message=message)

    def _folder_of_run(self, folder: str, prefix: str) -> Path | None:
        """The folder for the next trace; None without a root. Raises ValueError for a folder
        outside of the root."""
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
    """Runs `work` once, on a separate thread that the first call of `is_done` starts."""

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
    """A profile that is being recorded."""

    profiler: profile
    trace: Path | None
    max_steps: int
    kernels: Library | None  # kernels that record the times of their operations
    started: Future[None] = field(default_factory=Future)
    num_steps: int = 0
    timings: Timings = field(default_factory=Timings)

    def begin(self) -> None:
        """Start recording. Runs on the thread that runs steps."""
        if self.kernels is not None:
            self.kernels.timings = self.timings
        self.profiler.start_trace()

    def end(self) -> None:
        """Stop recording. Runs on the thread that runs steps."""
        if self.kernels is not None:
            self.kernels.timings = None
        self.profiler.stop_trace()

    def table(self) -> str:
        """The table of the operations that took most time of their own. Writes the trace, if it has
        a path."""
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
