"""What a start holds on to when a signal comes, and how an engine process ends that has hardly
begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from weft.config.engine import EngineConfig
from weft.config.engine_args import EngineArgs
from weft.launch.signals import STOPPING, StartSignals, Stopped

TIMEOUT_S = 240.0


def raise_here(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_stops_where_it_comes_and_no_further_one_does(number: signal.Signals) -> None:
    with StartSignals():
        with pytest.raises(Stopped):
            raise_here(number)
        for again in STOPPING:
            raise_here(again)


def test_a_signal_waits_until_deferred_work_is_done() -> None:
    done = []

    def start(signals: StartSignals) -> None:
        with signals.deferred():
            raise_here(signal.SIGTERM)
            done.append("whole")
        done.append("more")

    with StartSignals() as signals, pytest.raises(Stopped):
        start(signals)
    assert done == ["whole"]


def test_handlers_are_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    with StartSignals():
        assert before != [signal.getsignal(number) for number in STOPPING]
    assert before == [signal.getsignal(number) for number in STOPPING]


def test_an_engine_process_ends_with_its_launcher_also_while_it_is_imported() -> None:
    """The module that takes seconds to import is one that takes for ever."""
    code = """
        import importlib.abc, sys, time
        class Endless(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "weft.launch.worker":
                    print("importing", flush=True)
                    time.sleep(3600)
        sys.meta_path.insert(0, Endless())
        from weft.launch.start_worker import main
        main()
    """
    args = EngineArgs(
        config=EngineConfig(), folder="", to_engine="", from_engine="", rpc="", log_level="info"
    )
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(args.to_json() + b"\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == b"importing\n"
        worker.stdin.close()
        assert worker.wait(TIMEOUT_S) == 0
