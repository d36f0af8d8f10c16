"""Threads that use one `weft.LLM` at the same time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import HANG_S
from tests.launch.oracle_llm import EOS, VOCAB, oracle_llm
from tests.scheduler.oracle_runner import expected_output
from weft import LLM, SamplingParams
from weft.config.options import SettingsError
from weft.own_engine import FairLock

LONG = SamplingParams(max_new_tokens=40, temperature=0.0)
NUM_THREADS = 4


def expected(ids: list[int]) -> list[int]:
    return expected_output(ids, 40, VOCAB, {EOS})


def generated(llm: LLM, number: int) -> bool:
    prompts = [[number + 1, other + 1] for other in range(12)]
    outputs = llm.generate(prompts, LONG)
    return [output.token_ids for output in outputs] == [expected(ids) for ids in prompts]


def streamed(llm: LLM, number: int) -> bool:
    ids = [number + 1, 3, 5]
    deltas = list(llm.stream(ids, LONG))
    return [token for delta in deltas for token in delta.token_ids] == expected(ids)


@pytest.mark.parametrize("use", [generated, streamed])
def test_each_thread_gets_its_own_outputs(llm: LLM, use: Callable[[LLM, int], bool]) -> None:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(pool.map(use, [llm] * 12, range(12)))
    assert found == [True] * 12
    assert not llm._own.engine.has_work


def test_their_prompts_share_steps(llm: LLM) -> None:
    """The steps for one thread compute tokens of another one, too."""
    first = llm.stream([1, 2], SamplingParams(max_new_tokens=60, ignore_eos=True))
    assert len(next(first).token_ids) == 1
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(streamed, llm, 7).result(HANG_S)
    assert len(next(first).token_ids) > 10


def test_a_full_queue_is_filled_by_one_thread_after_the_other(folder: Path) -> None:
    llm, _ = oracle_llm(folder)
    llm._window = 2
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(pool.map(generated, [llm] * NUM_THREADS, range(NUM_THREADS)))
    assert found == [True] * NUM_THREADS


def test_an_llm_that_is_closed_ends_what_other_threads_wait_for(llm: LLM) -> None:
    open_stream = llm.stream([1, 2], SamplingParams(max_new_tokens=60, ignore_eos=True))
    next(open_stream)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(llm.close).result(HANG_S)
    with pytest.raises(SettingsError, match="it is closed"):
        list(open_stream)


def test_a_thread_that_takes_the_lock_again_waits_for_one_that_waits() -> None:
    order: list[str] = []
    waits = threading.Event()
    lock = FairLock(on_wait=waits.set)

    def take() -> None:
        with lock:
            order.append("other")

    other = threading.Thread(target=take)
    with lock, lock:
        other.start()
        waits.wait(HANG_S)
    with lock:
        order.append("first again")
    other.join()
    assert order == ["other", "first again"]


def test_one_thread_waits_for_the_lock_and_all_others_for_it() -> None:
    found: list[bool] = []
    waits = threading.Event()

    def on_wait() -> None:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(lock._gate.acquire, blocking=False).result(HANG_S))
        waits.set()

    lock = FairLock(on_wait=on_wait)
    other = threading.Thread(target=lock.__enter__)
    with lock:
        other.start()
        waits.wait(HANG_S)
    other.join()
    assert found == [False]


def test_what_ends_in_a_step_that_is_interrupted_is_counted(llm: LLM) -> None:
    own = llm._own
    stream: Any = llm.stream([1, 2], LONG)
    next(stream)
    before = own.num_ended
    with suppress(KeyboardInterrupt), own._counted_ends():
        stream.close()
        raise KeyboardInterrupt
    assert own.num_ended == before + 1


class Interrupt:
    """A signal that raises an error in the main thread, as Ctrl-C does, once."""

    def __init__(self) -> None:
        self.has_raised = threading.Event()

    def __call__(self, *_: object) -> None:
        if not self.has_raised.is_set():
            self.has_raised.set()
            raise KeyboardInterrupt


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    found = Interrupt()
    before = signal.signal(signal.SIGUSR2, found)
    yield found
    signal.signal(signal.SIGUSR2, before)


def test_who_is_interrupted_while_it_waits_keeps_nobody_out(interrupt: Interrupt) -> None:
    waits = threading.Event()
    is_taken = threading.Event()
    lock = FairLock(on_wait=waits.set)

    def hold() -> None:
        with lock:
            is_taken.set()
            waits.wait(HANG_S)
            # A signal that comes just before the system begins to wait does not end the wait.
            while not interrupt.has_raised.wait(0.01):
                os.kill(os.getpid(), signal.SIGUSR2)

    holder = threading.Thread(target=hold)
    holder.start()
    is_taken.wait(HANG_S)
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    holder.join()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lock.__enter__).result(HANG_S) is None
