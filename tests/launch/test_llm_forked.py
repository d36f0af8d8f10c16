"""Processes that are forked from one with a `weft.LLM`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from tests.e2e.server import HANG_S
from weft import LLM, SamplingParams

SHORT = SamplingParams(max_new_tokens=4, temperature=0.0)
PROGRAM = """
import os, sys
from weft import LLM, SamplingParams
from weft.messages.sampling import Grammar

digits = Grammar(kind="json_schema", text='{"type": "integer"}')
llm = LLM("weft-nano", kv_tokens=512)
params = SamplingParams(max_new_tokens=4, temperature=0.0, grammar=digits)
before = llm.generate("x", params)
process = os.fork()
if not process:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), llm.generate("x", params) == before)
"""


def error_in_fork(use: Callable[[], object]) -> str:
    """What it raises in a forked process; empty: nothing."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        said = b""
        try:
            use()
        except BaseException as exc:
            said = f"{type(exc).__name__}: {exc}".encode()
        os.write(writing, said)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said_there = pipe.read()
    os.waitpid(process, 0)
    return said_there.decode()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_refused_also_while_another_thread_has_the_lock(llm: LLM) -> None:
    stream = llm.stream("one", SamplingParams(max_new_tokens=60, ignore_eos=True))
    next(stream)
    has_it = threading.Event()
    may_end = threading.Event()

    def hold() -> None:
        with llm._own.lock:
            has_it.set()
            may_end.wait(HANG_S)

    holder = threading.Thread(target=hold)
    holder.start()
    has_it.wait(HANG_S)
    try:
        for use in (lambda: llm.generate("one", SHORT), lambda: next(stream), LLM):
            said = error_in_fork(use)
            assert said.startswith("SettingsError: LLM: this process was forked from one that had")
        assert not error_in_fork(llm.close)
    finally:
        may_end.set()
        holder.join()
    assert llm.generate("one", SHORT)
    stream.close()  # type: ignore[attr-defined]


def test_the_end_of_a_forked_process_ends_nothing_of_the_first() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=HANG_S
    )
    assert ended.stdout.split() == ["7", "True"], ended.stderr
