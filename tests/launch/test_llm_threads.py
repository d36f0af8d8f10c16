"""Threads that use one `weft.LLM` at the same time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server import HANG_S
from tests.launch.oracle_llm import EOS, VOCAB, oracle_llm
from tests.launch.tiny_model import write_tiny_model
from tests.scheduler.oracle_runner import expected_output
from weft import LLM, SamplingParams
from weft.config.options import SettingsError
from weft.own_engine import FairLock

LONG = SamplingParams(max_new_tokens=40, temperature=0.0)
NUM_THREADS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def llm(folder: Path) -> LLM:
    return oracle_llm(folder)[0]


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


def test_a_lock_goes_to_who_asked_first() -> None:
    begun = threading.Semaphore(0)
    lock = FairLock(on_wait=begun.release)
    order: list[int] = []

    def take(number: int) -> None:
        with lock, lock:
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(5)]
    with lock:
        for thread in threads:
            thread.start()
            begun.acquire()
    for thread in threads:
        thread.join()
    assert order == list(range(5))


@pytest.fixture
def raising() -> Iterator[None]:
    """A signal that raises an error in the main thread, as Ctrl-C does."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, fail)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("raising")
def test_who_is_interrupted_while_it_waits_leaves_the_others_in_order() -> None:
    waits = threading.Event()
    may_end = threading.Event()
    is_taken = threading.Event()
    lock = FairLock(on_wait=waits.set)

    def hold() -> None:
        with lock:
            is_taken.set()
            waits.wait(HANG_S)
            os.kill(os.getpid(), signal.SIGUSR1)
            may_end.wait(HANG_S)

    holder = threading.Thread(target=hold)
    holder.start()
    is_taken.wait(HANG_S)
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    may_end.set()
    holder.join()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lock.__enter__).result(HANG_S) is None
