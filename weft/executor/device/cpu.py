"""The CPU as a device: one thread that owns all torch work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def worker_thread(num_threads: int) -> ThreadPoolExecutor:
    """A pool of one thread on which torch works with `num_threads` threads (0: torch's own choice).

    All of a runner's torch calls belong there: OpenMP keeps a team of threads for each thread that calls it, and two
    teams on the same cores wait for each other.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="weft-runner", initializer=_set_up, initargs=(num_threads,))


def _set_up(num_threads: int) -> None:
    if num_threads:
        torch.set_num_threads(num_threads)
    torch.set_flush_denormal(True)  # tiny numbers would cost a hundred cycles each
