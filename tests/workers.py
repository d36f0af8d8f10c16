"""Runs files of tests in processes that are forked when all tests are collected: what the tests
import is imported once, and the memory that it takes is shared.

`--workers 3` starts three. Each takes the next file, longest first (`durations.py`), and sends what
its tests report to the process that collected them, which alone writes. A process that ends in the
midst of a test fails that test; another one goes on behind it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

from tests.durations import longest_first
from tests.freezing import freeze_for_good, freeze_what_stays

PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends
NUM_INDEX_BYTES = 2
QUICK_S = 0.005  # a setup or a teardown that nobody asks for
LAST_END_S = 20.0  # for processes that were told to end


class Queue:
    """Numbers that several processes take, each number once."""

    def __init__(self, size: int) -> None:
        self._reader, writer = os.pipe()
        for number in range(size):
            os.write(writer, number.to_bytes(NUM_INDEX_BYTES, "big"))
        os.close(writer)

    def __iter__(self) -> Iterator[int]:
        while found := os.read(self._reader, NUM_INDEX_BYTES):
            yield int.from_bytes(found, "big")

    def close(self) -> None:
        os.close(self._reader)


class Worker:
    """A process that runs tests, as the one that forked it sees it."""

    def __init__(self, pid: int, messages: Connection) -> None:
        self.pid = pid
        self.messages = messages
        self.running = ""  # the id of the test whose reports come
        self.is_done = False

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> int:
        """Wait for its end. Returns its status as `subprocess` has it."""
        self.messages.close()
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


class ForkedWorkers:
    """The loop over all tests, instead of pytest's own."""

    def __init__(self, num_workers: int, durations: Mapping[str, float]) -> None:
        self._num_workers = num_workers
        self._durations = durations
        self._items: dict[str, pytest.Item] = {}
        self._files: list[list[pytest.Item]] = []
        self._workers: list[Worker] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest says what could not be collected
        self._items = {item.nodeid: item for item in session.items}
        self._files = longest_first(session.items, self._durations)
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        # The collector of a process need not look at what all have, and does not copy it so.
        freeze_for_good()
        if forked := sys.modules.get("tests.forked"):
            forked.first_process()  # one for all: it imports weft
        queue = Queue(len(self._files))
        try:
            for _ in range(min(self._num_workers, len(self._files))):
                self._start(session, queue, [])
            self._collect_reports(session, queue)
        finally:
            queue.close()
            self._end_all()
        return True

    # ---- in the process that has collected the tests

    def _start(self, session: pytest.Session, queue: Queue, first: list[pytest.Item]) -> None:
        """Start a process that runs the tests `first`, then files."""
        ours, theirs = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            self._workers.append(Worker(pid, ours))
            return
        status = 1
        try:
            _end_with(parent)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            ours.close()
            for worker in self._workers:
                worker.messages.close()
            Inside(session, theirs).run(self._files_of(queue, first))
            status = 0
        except BaseException:  # an exception must not go on in a second copy of pytest
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _end_all(self) -> None:
        """End the processes that still run, as Ctrl-C would: they end what they have started."""
        for worker in self._workers:
            os.kill(worker.pid, signal.SIGINT)
        deadline = time.monotonic() + LAST_END_S
        for worker in self._workers:
            while not worker.has_ended() and time.monotonic() < deadline:
                time.sleep(0.05)
            if not worker.has_ended():
                os.kill(worker.pid, signal.SIGKILL)
            worker.end()

    def _files_of(self, queue: Queue, first: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
        yield first
        for number in queue:
            yield self._files[number]

    def _collect_reports(self, session: pytest.Session, queue: Queue) -> None:
        while self._workers:
            ready = wait([worker.messages for worker in self._workers])
            for worker in [one for one in self._workers if one.messages in ready]:
                try:
                    kind, *values = worker.messages.recv()
                except EOFError:
                    self._workers.remove(worker)
                    self._note_end(session, worker, queue)
                    continue
                self._take(session, worker, kind, values)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)

    def _take(self, session: pytest.Session, worker: Worker, kind: str, values: list[Any]) -> None:
        hook = session.config.hook
        if kind == "start":
            nodeid, location = values
            worker.running = nodeid
            hook.pytest_runtest_logstart(nodeid=nodeid, location=location)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=values[0])
            hook.pytest_runtest_logreport(report=report)
        elif kind == "finish":
            nodeid, location = values
            worker.running = ""
            hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)
        elif kind == "warning":
            text, filename, lineno, when, nodeid = values
            warning = warnings.WarningMessage(text, UserWarning, filename, lineno)
            hook.pytest_warning_recorded.call_historic(
                kwargs=dict(warning_message=warning, when=when, nodeid=nodeid, location=None)
            )
        else:
            assert kind == "done"
            worker.is_done = True

    def _note_end(self, session: pytest.Session, worker: Worker, queue: Queue) -> None:
        status = worker.end()
        if worker.is_done:
            return
        if not worker.running:
            raise session.Interrupted(f"a process that runs tests has ended with status {status}")
        item = self._items[worker.running]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"the process that ran this test has ended with status {status}",
            when="call",
        )
        hook = session.config.hook
        hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        file = next(file for file in self._files if item in file)
        self._start(session, queue, file[file.index(item) + 1 :])


class Inside:
    """What a process that runs tests does with them."""

    def __init__(self, session: pytest.Session, messages: Connection) -> None:
        self._session = session
        self._messages = messages

    def run(self, files: Iterable[list[pytest.Item]]) -> None:
        """Run the tests of each of these files. The next file is taken when one is over."""
        session = self._session
        plugins = session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(self)
        capture = plugins.get_plugin("capturemanager")
        if capture is not None:  # its files would be those of all processes
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture()
        try:
            for items in files:
                self._run_file(items)
        finally:
            session._setupstate.teardown_exact(None)  # if it was interrupted
        atexit._run_exitfuncs()
        self.send("done")

    def _run_file(self, items: list[pytest.Item]) -> None:
        """Fixtures of the folder and of the session stay: what comes behind these tests is as yet
        any test of the folder."""
        if not items:
            return
        setup = self._session._setupstate
        setup.teardown_exact(items[0])  # fixtures of another folder
        module = items[0].getparent(pytest.Module)
        folder = module.parent if module is not None else None
        for item, following in zip(items, [*items[1:], folder], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        freeze_what_stays()

    def send(self, kind: str, *values: object) -> None:
        self._messages.send((kind, *values))

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self.send("start", nodeid, location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed and report.duration < QUICK_S:
            return  # of three reports of a test, two say nothing
        config = self._session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self.send("report", data)

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        self.send("finish", nodeid, location)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str
    ) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        place = warning_message.filename, warning_message.lineno
        self.send("warning", text, *place, when, nodeid)


def _end_with(parent: int) -> None:
    """Let this process end when its parent does, however that ends."""
    if Path("/proc/self").exists():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
