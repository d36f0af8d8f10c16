"""What the cache on disk costs and gives on this machine, as ratios within one run.

    python benchmarks/cache.py                     reading against dd, warm and cold
    python benchmarks/cache.py --model FOLDER      what look-ups and writing cost beside requests
                               --turns 150 --waves 10    to a hundredth and better, in minutes
    python benchmarks/cache.py --model FOLDER --restart      time to the first token before and after a restart

Reading: blocks of the layout of a 0.6B model in bfloat16 (56 pieces of 32 kB a page), read by the store's thread
straight into a pool, against `dd` of the same files. Cold: the files are synced, and the system is told to drop them.

With a model: `miss`: prompts that nobody has sent before, and steps of four requests that decode, on one engine, in
whose turns the store is asked or not (its service is detached): so memory, its layout and the other work of the machine
are the same. It is processor time of this process, with one thread of kernels; `plain again`, without the store, says
what the noise is. The time in the store's own calls is told, too. `writing`: requests that decode while everything that has ended is written, and on an engine without a
folder, by the clock.

Restart: a server computes a prompt, finds it in memory, and is stopped; two others find it in the folder, the second
one after the system was told to drop the files.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import timeit
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np

from weft.arrays import IntArray
from weft.assemble.build import build_engine
from weft.assemble.prepare import prepare
from weft.config.engine import EngineConfig
from weft.config.machine import probe
from weft.memory.prefix_cache import CacheKey
from weft.messages.codec import FromEngine
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.tiers.disk.store import DiskTiers

PAGE_SIZE = 16
BLOCK_LEN = 64
PIECE_BYTES = 32_768
NUM_PIECES = 56
NUM_TOKENS = 4_096
ROUNDS = 5
MODES = ("plain", "miss", "plain again")
MISS_TURNS = 140
STEPS_OF_TURN = 4
WARM_TURNS = 5
OWN_TURNS = 20
OWN_CALLS = 2_000
NUM_STREAMS = 4
MOST_STEPS = 1_900  # of a request
QUICKEST_OF = 10  # turns
MOST_TURNS = 150  # in which all modes decode, of one wave of requests
RESTART_LEN = 2_000  # tokens of the prompt
HANG_S = 60.0


class ShapedPool:
    """Memory of the layout of a KV pool of a 0.6B model."""

    page_bytes = PIECE_BYTES * NUM_PIECES

    def __init__(self, num_pages: int) -> None:
        size = num_pages * PIECE_BYTES
        self._tensors = [np.ones(size, dtype=np.uint8) for _ in range(NUM_PIECES)]

    def pieces(self, page: int) -> list[memoryview]:
        start = page * PIECE_BYTES
        return [tensor.data[start : start + PIECE_BYTES] for tensor in self._tensors]


# ---- reading


def measure_reads(folder: Path) -> None:
    num_pages = NUM_TOKENS // PAGE_SIZE
    pool = ShapedPool(num_pages)
    bell: queue.SimpleQueue[None] = queue.SimpleQueue()
    tiers = DiskTiers(
        folder,
        pool,
        page_size=PAGE_SIZE,
        block_len=BLOCK_LEN,
        max_bytes=10**12,
        weights=lambda: lambda: b"benchmark".ljust(32),
        notify=lambda: bell.put(None),
    )
    tiers.start()
    await_news(tiers, bell)
    key = CacheKey("", np.arange(NUM_TOKENS, dtype=np.int32).tobytes())
    pages: IntArray = np.arange(num_pages, dtype=np.int32)
    tiers.keep(0, key, 0, pages)
    await_news(tiers, bell)
    files = sorted(folder.rglob("*.kv"))
    num_bytes = sum(file.stat().st_size for file in files)
    print(f"{num_bytes / 1e6:,.0f} MB in {len(files)} files")
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())

    ticket = 0

    def read() -> None:
        nonlocal ticket
        ticket += 1
        tiers.fetch(ticket, key, 0, pages)
        news = await_news(tiers, bell)
        assert news.landed[0].num_tokens == NUM_TOKENS

    def dd() -> None:
        for file in files:
            subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=1M", "status=none"], check=True)

    for name, prepare_files in (("warm", lambda: None), ("cold", lambda: drop(files))):
        times: dict[str, list[float]] = {"read": [], "dd": []}
        for _ in range(ROUNDS):
            for what, work in (("read", read), ("dd", dd)):
                prepare_files()
                times[what].append(seconds(work))
        rates = {what: num_bytes / statistics.median(found) / 1e9 for what, found in times.items()}
        print(
            f"{name}: {rates['read']:.2f} GB/s into the pool, dd {rates['dd']:.2f} GB/s, "
            f"ratio {rates['read'] / rates['dd']:.2f}"
        )


def drop(files: list[Path]) -> None:
    """Tell the system that nobody needs these in memory."""
    for file in files:
        with file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def await_news(tiers: DiskTiers, bell: queue.SimpleQueue[None]):  # type: ignore[no-untyped-def]
    while True:
        bell.get(timeout=HANG_S)
        news = tiers.take()
        if news.landed or news.written or news.has_opened:
            return news


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ---- beside requests


class Served:
    """An engine in this process."""

    def __init__(
        self, model: str, cache_dir: str, write: str, load_format: str, threads: int = 0
    ) -> None:
        config = EngineConfig(
            model=model,
            device="cpu",
            kv_tokens=12_288,
            cache_dir=cache_dir,
            cache_write=write,
            load_format=load_format,
            threads=threads,
            speculative="off",  # guesses cost one turn more and another one less
        )
        prepared = prepare(config, probe())
        self.built = build_engine(prepared.config, prepared.folder)
        self._num = 0
        self._store = self.built.engine.services.tiers
        while cache_dir and self.built.engine.services.tiers.tiers.report().state != "open":
            self.built.engine.step()
            time.sleep(0.01)

    def use_store(self, is_used: bool) -> None:
        """Whether steps, and requests that come from now on, ask the store."""
        store = self._store
        assert store is not None
        engine = self.built.engine
        of_all = engine.scheduler.hooks._of_all
        if store.feature in of_all:
            of_all.remove(store.feature)
        engine.core.hooks.detach(store)
        if is_used:
            of_all.append(store.feature)
            engine.core.hooks.attach(store)

    def calls_of_store(self) -> list[tuple[object, str]]:
        """The calls of the store in steps, and for requests."""
        assert self._store is not None
        of_steps = [(self._store, name) for name in ("opened", "before_step", "after_step")]
        of_requests = [(self._store.feature, name) for name in ("admit", "enter_row", "end")]
        return [*of_steps, *of_requests]

    def own_time_of_step(self) -> float:
        """Seconds that the store's calls of a step take where nothing is under way: the least of
        many. They take less than a look at a clock of processor time."""
        store = self._store
        assert store is not None

        def calls() -> None:
            store.before_step(0.0)
            store.after_step(0.0)

        return min(timeit.repeat(calls, number=OWN_CALLS, repeat=OWN_TURNS)) / OWN_CALLS

    def begin_decoding(self, rng: np.random.Generator, num_requests: int) -> None:
        """Submit requests, and let them generate for a while."""
        for _ in range(num_requests):
            self.submit(rng, 64, MOST_STEPS)
        self.steps(STEPS_OF_TURN * num_requests)

    def steps(self, num: int) -> None:
        for _ in range(num):
            self.built.engine.step()

    def submit(self, rng: np.random.Generator, num_tokens: int, max_new: int) -> int:
        self._num += 1
        ids = rng.integers(10, 200, num_tokens).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=True)
        request = GenerateRequest(id=self._num, rid="", input_ids=ids.tobytes(), sampling=sampling)
        self.built.engine.submit(request)
        return self._num

    def run_until(self, is_over: Callable[[FromEngine], bool]) -> None:
        while True:
            for reply in self.built.engine.step():
                if is_over(reply):
                    return

    def ttft(self, rng: np.random.Generator, num_tokens: int) -> float:
        began = time.perf_counter()
        self.submit(rng, num_tokens, 1)
        self.run_until(lambda reply: isinstance(reply, StepOutput) and bool(reply.ids))
        self.finish()
        return time.perf_counter() - began

    def finish(self) -> None:
        """Let all requests end."""
        while self.built.engine.has_work:
            self.built.engine.step()

    def decode(self, rng: np.random.Generator, num_requests: int, num_tokens: int) -> float:
        """Seconds from the first token of the last of some requests to the end of all."""
        own = {self.submit(rng, 256, num_tokens) for _ in range(num_requests)}
        waiting = set(own)
        began = 0.0
        while own:
            for reply in self.built.engine.step():
                if not isinstance(reply, StepOutput):
                    continue
                if waiting:
                    waiting -= set(np.frombuffer(reply.ids, dtype=np.int64).tolist())
                    began = time.perf_counter()
                own -= {finish.id for finish in reply.finished}
        return time.perf_counter() - began


def measure_misses(
    model: str, folder: Path, load_format: str, prompt_len: int, num_turns: int, num_waves: int
) -> None:
    one = Served(model, str(folder / "miss"), "off", load_format, threads=1)
    rng = np.random.default_rng(0)
    order = np.random.default_rng(2)
    for _ in range(WARM_TURNS):
        one.ttft(rng, prompt_len)
    tell("TTFT", in_turns(one, lambda: one.ttft(rng, prompt_len), num_turns, order))
    share = own_share(one, lambda: one.ttft(rng, prompt_len), OWN_TURNS)
    print(f"calls of the store: {share:.4%} of the time to the first token")
    spent: dict[str, list[np.ndarray]] = {name: [] for name in MODES}  # type: ignore[type-arg]
    for _ in range(num_waves):
        one.begin_decoding(rng, NUM_STREAMS)
        for _ in range(WARM_TURNS):
            one.steps(STEPS_OF_TURN)
        turns = min(num_turns, MOST_TURNS)
        found = in_turns(one, lambda: one.steps(STEPS_OF_TURN), turns, order)
        for name in MODES:
            spent[name].append(found[name])
        one.finish()
    tell("decode", {name: quickest(np.concatenate(found)) for name, found in spent.items()})
    own_s = one.own_time_of_step()
    step_s = float(np.median(np.concatenate(spent["plain"]))) / STEPS_OF_TURN
    print(f"calls of the store: {1e6 * own_s:.2f} µs of a step, {own_s / step_s:.4%}")


def own_share(one: Served, work: Callable[[], object], num_turns: int) -> float:
    """What of the processor time the calls of the store take themselves, by the clock of the
    thread: an upper bound, for the clock takes time, too."""
    one.use_store(True)
    with Stopwatch(one.calls_of_store()) as watch:
        began = time.thread_time()
        for _ in range(num_turns):
            work()
        return watch.spent_s / (time.thread_time() - began)


class Stopwatch:
    """Adds up the processor time of calls, as long as it is open."""

    def __init__(self, calls: list[tuple[object, str]]) -> None:
        self._calls = calls
        self.spent_s = 0.0

    def __enter__(self) -> Stopwatch:
        for owner, name in self._calls:
            setattr(owner, name, self._timed(getattr(owner, name)))
        return self

    def __exit__(self, *exc: object) -> None:
        for owner, name in self._calls:
            delattr(owner, name)  # the class has the plain one

    def _timed(self, call: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **named: object) -> object:
            began = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                self.spent_s += time.thread_time() - began

        return timed


def in_turns(
    one: Served, work: Callable[[], object], num_turns: int, order: np.random.Generator
) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """Seconds of processor time [num_turns] of each mode, one after the other in random order."""
    spent: dict[str, list[float]] = {name: [] for name in MODES}
    for _ in range(num_turns):
        for name in order.permutation(MODES).tolist():
            one.use_store(name == "miss")
            began = time.process_time()
            work()
            spent[name].append(time.process_time() - began)
    return {name: np.array(found) for name, found in spent.items()}


def quickest(spent: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """Of each `QUICKEST_OF` turns the one that took least: what a step has to do takes as long in
    each, and what the machine does beside it, does not."""
    num_groups = max(len(spent) // QUICKEST_OF, 1)
    groups = np.array_split(spent, num_groups)
    return np.array([group.min() for group in groups])


def tell(what: str, spent: dict[str, np.ndarray]) -> None:  # type: ignore[type-arg]
    for name in MODES[1:]:
        ratios = spent[name] / spent["plain"]
        low, high = confidence(ratios)
        print(
            f"{name}: {what} {np.median(ratios):.4f} of plain (95 %: {low:.4f} to {high:.4f}, "
            f"{len(ratios)} turns of {1e3 * np.median(spent['plain']):.1f} ms)"
        )


def confidence(values: np.ndarray) -> tuple[float, float]:  # type: ignore[type-arg]
    """Between what the median lies, by resampling."""
    rng = np.random.default_rng(1)
    medians = np.median(rng.choice(values, (2_000, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def measure_writing(model: str, folder: Path, load_format: str) -> None:
    plain = Served(model, "", "off", load_format)
    writing = Served(model, str(folder / "write"), "through", load_format)
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(2 * ROUNDS):
        plain_s = plain.decode(rng, 4, 64)
        for _ in range(4):
            writing.submit(rng, 512, 1)
        ratios.append(plain_s / writing.decode(rng, 4, 64))
    low, high = np.quantile(ratios, [0.25, 0.75])
    print(
        f"writing: speed {statistics.median(ratios):.3f} of plain (quartiles {low:.3f} to {high:.3f})"
    )
    report = writing.built.engine.services.tiers.tiers.report()
    print(f"written meanwhile: {report.written_bytes / 1e6:,.0f} MB")


# ---- restart


class Server:
    """`weft serve`, until it is ready."""

    def __init__(self, model: str, folder: Path) -> None:
        words = (model, "--kv-tokens", "6144", "--cache-dir", str(folder), "--port", "0")
        more = ("--drain-s", "60", "--cache-wait-ms", "60000", "--dtype", "bfloat16")
        command = [sys.executable, "-m", "weft", "serve", *words, *more]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        self.url = ""
        for line in self._process.stderr:
            if found := re.search(r"ready in .* (http://\S+)", line):
                self.url = found[1]
                break
        if not self.url:
            raise SystemExit(f"weft serve {model} has not started")
        threading.Thread(target=self._process.stderr.read, daemon=True).start()
        while json.loads(self._get("/cache"))["disk"] != "open":
            time.sleep(0.2)
        self.ttft(list(range(10, 74)))  # the first request of all is slower

    def stop(self) -> None:
        """It writes what it has been asked twice."""
        self._process.terminate()
        self._process.wait()

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path) as answer:
            content: bytes = answer.read()
            return content

    def ttft(self, prompt: list[int]) -> tuple[float, int, list[int]]:
        """Seconds to the first token, tokens that were found, and eight tokens of output."""
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(
            self.url + "/generate", json.dumps(body).encode(), headers=headers
        )
        began = time.perf_counter()
        first_s = 0.0
        last = {}
        with urllib.request.urlopen(asked) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                first_s = first_s or time.perf_counter() - began
                last = json.loads(line[6:])
        return first_s, last["meta_info"]["cached_tokens"], last["output_ids"]


def measure_restart(model: str, folder: Path) -> None:
    prompt = np.random.default_rng(3).integers(10, 4_000, RESTART_LEN).tolist()
    server = Server(model, folder)
    try:
        computed_s, _, expected = server.ttft(prompt)
        memory_s, _, _ = server.ttft(prompt)
    finally:
        server.stop()
    print(f"computed in {computed_s:.2f} s, found in memory in {memory_s:.3f} s")
    for name in ("in memory of the system", "dropped"):
        if name == "dropped":
            files = sorted(folder.rglob("*.kv"))
            for file in files:
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            drop(files)
        server = Server(model, folder)
        try:
            found_s, num_cached, output = server.ttft(prompt)
        finally:
            server.stop()
        same = "the same tokens" if output == expected else "OTHER TOKENS"
        print(
            f"after a restart, files {name}: {num_cached:,} tokens found in {found_s:.3f} s, "
            f"{found_s / computed_s:.3f} of computing, {same}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default="", help="where files are written; a temporary one")
    parser.add_argument("--model", default="", help="folder of a model")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=MISS_TURNS, help="of misses")
    parser.add_argument("--waves", type=int, default=1, help="of requests that decode in turns")
    parser.add_argument("--restart", action="store_true", help="before and after a restart")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Stores may still be writing when all has been measured.
    folders = tempfile.TemporaryDirectory(dir=args.folder or None, ignore_cleanup_errors=True)
    with folders as temporary:
        folder = Path(temporary)
        if args.restart:
            measure_restart(args.model, folder)
        elif args.model:
            measure_misses(
                args.model, folder, args.load_format, args.prompt_len, args.turns, args.waves
            )
            measure_writing(args.model, folder, args.load_format)
        else:
            (folder / "reads").mkdir()
            measure_reads(folder / "reads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
