"""`weft bench roofline`: how much of the machine decode and prefill use, by the size of the batch.

    decode    one token of each of b requests: reads all weights for b tokens
    prefill   n tokens of one prompt: reads all weights for n tokens

Both roofs are measured in the same run, on the threads that compute: bytes a second that are read
from memory, and operations a second of a large product. What a step must do at least (its
operations, and the bytes of weights and KV) is counted, and divided by its time and by the roof.
Rounds of roofs and steps take turns, and the fastest of each counts, because other programs only
make it slower. It counts dense decoders. Weights that are kept as codes count with the bytes of the
file, on average where the matrix of the input has a type of its own; their products are of small
integers on many processors, and may be faster than those of the measured roof. A model that fits
the processor's cache is not read from memory: the table says so instead of a part.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weft.assemble.model_config import choose_model
from weft.assemble.model_folder import model_folder
from weft.bench.results import write_json
from weft.bench.testbed import Testbed, with_model
from weft.config.engine import EngineConfig
from weft.config.machine import probe
from weft.config.model import ModelConfig
from weft.config.options import Settings, SettingsError, option
from weft.config.resolve import kept_as, resolve
from weft.sim.fit import StepTime
from weft.sim.synthetic import at_once
from weft.sim.table import table

if TYPE_CHECKING:
    import torch

READ_BYTES = 512_000_000  # more than any cache
PRODUCT = (1_024, 2_048, 2_048)
FEW_ROWS = 16
OUTPUT_LEN = 8  # of a decode round: its median step is one with all requests
BAR_LEN = 30
UNITS = {"K": 10, "M": 20, "G": 30}  # powers of 2 in sizes of caches


@dataclass(frozen=True, kw_only=True)
class RooflineOptions:
    batches: str = option(
        "1,2,4,8,16,32", "requests that decode together", group="bench", everyday=True
    )
    prompts: str = option(
        "16,64,256", "tokens of a prompt in one step", group="bench", everyday=True
    )
    rounds: int = option(
        3, "rounds, of which the fastest counts", group="bench", everyday=True, low=1
    )
    json: str = option(
        "",
        "file for the figures as JSON",
        group="bench",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )


class Roofs(NamedTuple):
    """The fastest of each that this machine has done."""

    bytes_per_s: float = 0.0
    ops_per_s: float = 0.0

    def best(
        self,
        other: Roofs,
    ) -> Roofs:
        return Roofs(*map(max, self, other))


class LeastWork(NamedTuple):
    """What a step must do at least."""

    num_ops: float
    num_bytes: float

    @classmethod
    def of(
        cls,
        step: StepTime,
        model: ModelConfig,
    ) -> LeastWork:
        """Two operations for each weight and token, and for each number of a cached K and V that
        attention reads; the head only for sampled tokens."""
        head = model.vocab_size * model.hidden_size
        per_weight = model.weights_bytes / model.num_parameters
        num_tables = 1 if model.tie_embeddings else 2
        in_layers = model.num_parameters - num_tables * head
        kv_bytes = model.kv_bytes_per_token * step.context
        of_layers = 2.0 * in_layers * step.num_tokens
        of_head = 2.0 * head * step.num_samples
        # Of each pair of a query and a token: as many for K as for V, for each group of heads.
        num_pairs = step.context
        if step.num_tokens > step.num_samples:  # a prompt attends to its own beginning
            num_pairs = step.num_tokens * (step.num_tokens + 1) // 2
        of_pairs = 4.0 * num_pairs * model.num_heads * model.head_dim * model.num_layers
        return cls(
            num_ops=of_layers + of_head + of_pairs,
            num_bytes=(in_layers + head) * per_weight + kv_bytes,
        )


class Point(NamedTuple):
    """A kind of step: the parts of both roofs that its fastest one has reached."""

    kind: str
    size: int  # requests, or tokens of the prompt
    seconds: float
    of_bytes: float
    of_ops: float
    # What it reads fits the processor's cache, so the bandwidth of memory is no roof of it.
    is_cached: bool = False

    @property
    def bound_by(self) -> str:
        if self.is_cached:
            return "cache or compute"
        return "bandwidth" if self.of_bytes > self.of_ops else "compute"

    @property
    def used(self) -> float:
        """The larger part of a roof that holds for it."""
        return self.of_ops if self.is_cached else max(self.of_bytes, self.of_ops)


def bench_roofline(settings: Settings) -> int:
    options = settings.make(RooflineOptions)
    config = with_model(settings.make(EngineConfig))
    batches = read_sizes(options.batches, "--batches")
    prompts = read_sizes(options.prompts, "--prompts")
    model = choose_model(config, model_folder(config))
    model = kept_as(resolve(config, model, probe()).config, model)
    if model.has_experts or model.is_encoder:
        raise SettingsError(
            f"{model.name} is no dense decoder: roofs are not known for encoders, and for experts"
        )
    testbed = Testbed.of(config)
    roofs = Roofs()
    fastest: dict[tuple[str, int], StepTime] = {}
    for _ in range(options.rounds):
        for kind, sizes in (("decode", batches), ("prefill", prompts)):
            for size in sizes:
                roofs = roofs.best(measure_roofs(testbed.threads))
                step = _fastest_step(testbed, kind, size)
                before = fastest.get((kind, size))
                if before is None or step.seconds < before.seconds:
                    fastest[kind, size] = step
    points = [point(kind, size, step, model, roofs) for (kind, size), step in fastest.items()]
    print(f"{testbed.summary}, {testbed.threads} threads of a {processor_name()}")
    print(
        f"roofs: {roofs.bytes_per_s / 1e9:.1f} GB/s read, "
        f"{roofs.ops_per_s / 1e9:,.0f} billion operations/s"
    )
    print(report(points))
    found = [one._asdict() for one in points]
    about = {"model": testbed.summary, "processor": processor_name(), "roofs": roofs._asdict()}
    write_json(options.json, "roofline", about, found)
    return 0


def point(
    kind: str,
    size: int,
    step: StepTime,
    model: ModelConfig,
    roofs: Roofs,
) -> Point:
    work = LeastWork.of(step, model)
    return Point(
        kind=kind,
        size=size,
        seconds=step.seconds,
        of_bytes=work.num_bytes / step.seconds / roofs.bytes_per_s,
        of_ops=work.num_ops / step.seconds / roofs.ops_per_s,
        is_cached=work.num_bytes < cache_bytes(),
    )


def report(points: Sequence[Point]) -> str:
    """A line for each kind of step: its time, its parts of both roofs, and the larger as a bar."""
    header = ["step", "size", "ms", "ms/token", "of bandwidth", "of compute", "bound by"]
    rows = []
    for one in points:
        milliseconds = 1e3 * one.seconds
        row = [
            one.kind,
            f"{one.size:,}",
            f"{milliseconds:.1f}",
            f"{milliseconds / one.size:.2f}",
            "in cache" if one.is_cached else f"{one.of_bytes:.0%}",
            f"{one.of_ops:.0%}",
            one.bound_by,
        ]
        rows.append(row)
    head, rule, *lines = table(header, rows).splitlines()
    drawn = []
    for one, line in zip(points, lines, strict=True):
        length = round(BAR_LEN * min(one.used, 1.0))
        drawn.append(f"{line}  {'#' * length}")
    return "\n".join([head, rule, *drawn])


def measure_roofs(threads: int) -> Roofs:
    """Read more than the caches hold, and multiply matrices, with so many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # each thread of ours reads a part of its own
    parts = torch.ones(threads, READ_BYTES // threads // 4)
    with ThreadPoolExecutor(threads) as pool:
        read_s = _seconds(lambda: list(pool.map(torch.sum, parts)))
    torch.set_num_threads(threads)
    rows, inner, columns = PRODUCT
    # Without instructions for bfloat16 such a product takes a minute: a few rows tell which is
    # faster.
    few = min(rows, FEW_ROWS)
    dtype = min(torch.bfloat16, torch.float32, key=lambda one: _product_s(one, few))
    ops_per_s = 2.0 * rows * inner * columns / _product_s(dtype, rows)
    torch.set_num_threads(before)
    return Roofs(parts.nbytes / read_s, ops_per_s)


def _product_s(dtype: torch.dtype, rows: int) -> float:
    """Seconds of a product of `PRODUCT` with so many rows."""
    import torch

    _, inner, columns = PRODUCT
    left = torch.ones(rows, inner, dtype=dtype)
    right = torch.ones(inner, columns, dtype=dtype)
    return _seconds(partial(torch.mm, left, right))


def read_sizes(
    text: str,
    name: str,
) -> list[int]:
    """Read 1,16. Raises SettingsError."""
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise SettingsError(f"{name} is {text!r}; numbers like 1,16 are expected")
    return sizes


def cache_bytes() -> int:
    """Size of the largest cache of the first processor; 0: unknown."""
    largest = 0
    for size in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KMG])", size.read_text().strip())
        if found is not None:
            largest = max(largest, int(found[1]) << UNITS[found[2]])
    return largest


def processor_name() -> str:
    """The name of this processor, as the system has it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "processor"


def _fastest_step(
    testbed: Testbed,
    kind: str,
    size: int,
) -> StepTime:
    """The fastest step of this kind in one run. Raises SettingsError if there is none."""
    num_before = len(testbed.steps)
    if kind == "decode":
        lengths = [(1, OUTPUT_LEN)] * size
        wanted = (size, size)
    else:
        lengths = [(size, 1)]
        wanted = (size, 1)
    testbed.play(at_once(lengths, first_key=testbed.new_key))
    steps = testbed.steps[num_before:]
    found = [one for one in steps if (one.num_tokens, one.num_samples) == wanted]
    if not found:
        raise SettingsError(
            f"no step of this run has {size:,} {'requests' if kind == 'decode' else 'tokens'}: "
            "--max-running-requests, --chunked-prefill-size and --speculative limit it"
        )
    return min(found, key=lambda one: one.seconds)


def _seconds(
    work: Callable[[], object],
) -> float:
    """The shorter of two runs, after one that warms up."""
    work()
    found = []
    for _ in range(2):
        began_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - began_s)
    return min(found)
