"""What the cache on disk costs and gives on this machine, as ratios within one run.

    python benchmarks/cache.py                     reading against dd, warm and cold
    python benchmarks/cache.py --model FOLDER      and what look-ups and writing cost beside requests

Reading: blocks of the layout of a 0.6B model in bfloat16 (56 pieces of 32 kB a page), read by the store's thread
straight into a pool, against `dd` of the same files. Cold: the files are synced, and the system is told to drop them.

With a model: the same requests on an engine with a folder and on one without, in turns. `miss`: prompts that nobody has
sent before. `writing`: requests that decode while everything that has ended is written.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
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
from weft.tiers.disk import DiskTiers

PAGE_SIZE = 16
BLOCK_LEN = 64
PIECE_BYTES = 32_768
NUM_PIECES = 56
NUM_TOKENS = 4_096
ROUNDS = 5
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

    def __init__(self, model: str, cache_dir: str, write: str, load_format: str) -> None:
        config = EngineConfig(
            model=model,
            device="cpu",
            kv_tokens=16_384,
            cache_dir=cache_dir,
            cache_write=write,
            load_format=load_format,
        )
        prepared = prepare(config, probe())
        self.built = build_engine(prepared.config, prepared.folder)
        self._num = 0
        while cache_dir and self.built.engine.services.tiers.tiers.report().state != "open":
            self.built.engine.step()
            time.sleep(0.01)

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
        while self.built.engine.has_work:
            self.built.engine.step()
        return time.perf_counter() - began

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


def measure_requests(model: str, folder: Path, load_format: str, prompt_len: int) -> None:
    plain = Served(model, "", "off", load_format)
    reading = Served(model, str(folder / "miss"), "off", load_format)
    writing = Served(model, str(folder / "write"), "through", load_format)
    rng = np.random.default_rng(0)
    ratios: dict[str, list[float]] = {"miss: TTFT": [], "miss: decode": [], "writing: speed": []}
    for number in range(2 * ROUNDS):
        # In turns: neither is always the first.
        pair = [plain, reading] if number % 2 else [reading, plain]
        for _ in range(4):
            times = {id(one): one.ttft(rng, prompt_len) for one in pair}
            ratios["miss: TTFT"].append(times[id(reading)] / times[id(plain)])
        times = {id(one): one.decode(rng, 4, 64) for one in pair}
        ratios["miss: decode"].append(times[id(reading)] / times[id(plain)])
        for _ in range(4):
            writing.submit(rng, 512, 1)
        ratios["writing: speed"].append(times[id(plain)] / writing.decode(rng, 4, 64))
    for name, found in ratios.items():
        low, high = np.quantile(found, [0.25, 0.75])
        print(f"{name}: {statistics.median(found):.3f} (quartiles {low:.3f} to {high:.3f})")
    report = writing.built.engine.services.tiers.tiers.report()
    print(f"written meanwhile: {report.written_bytes / 1e6:,.0f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default="", help="where files are written; a temporary one")
    parser.add_argument("--model", default="", help="folder of a model")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens of a prompt")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder or None) as temporary:
        folder = Path(temporary)
        if args.model:
            measure_requests(args.model, folder, args.load_format, args.prompt_len)
        else:
            (folder / "reads").mkdir()
            measure_reads(folder / "reads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
