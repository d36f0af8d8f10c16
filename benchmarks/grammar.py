"""`python -m benchmarks.grammar`: the cost of structured output. The same requests run without a grammar,
with masks of a grammar, and with masks and jumps."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.assemble.model_folder import model_folder
from weft.bench.results import write_json
from weft.bench.testbed import Testbed, with_model
from weft.cli.bench import run_command
from weft.config.engine import EngineConfig
from weft.config.options import Command, Settings, SettingsError, option
from weft.engine.engine import Engine
from weft.grammar.backends import make_compiler
from weft.grammar.masks import LazyBitmaskRow, Words
from weft.grammar.pool import GrammarPool
from weft.grammar.protocol import (
    Advance,
    Compiled,
    Compiler,
    CompileResult,
    Constraint,
    GrammarMatcher,
    Grammars,
    Key,
)
from weft.json_types import JsonObject
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import Grammar, SamplingParams
from weft.sim.table import number, table

# An endless list of objects with long names: text that the model chooses between forced text.
SCHEMA = """{"type": "array", "minItems": 100000, "items": {"type": "object", "properties": {
    "customer_reference_number": {"type": "integer", "minimum": 0},
    "shipping_address_city": {"type": "string", "maxLength": 40},
    "preferred_delivery_window": {"enum": ["in the morning", "in the afternoon", "in the evening"]},
    "is_returning_customer": {"type": "boolean"}
}, "required": ["customer_reference_number", "shipping_address_city", "preferred_delivery_window",
    "is_returning_customer"], "additionalProperties": false}}"""


@dataclass(frozen=True, kw_only=True)
class GrammarOptions:
    streams: int = option(16, "how many requests at once", group="bench", everyday=True, low=1)
    input_len: int = option(32, "tokens of each prompt", group="bench", everyday=True, low=1)
    output_len: int = option(192, "tokens of each completion", group="bench", everyday=True, low=2)
    schema: str = option(
        "",
        "file with a JSON schema whose texts are at least that long",
        group="bench",
        everyday=True,
    )
    repeats: int = option(
        7,
        "measured runs of each kind, after one that is not measured",
        group="bench",
        everyday=True,
        low=1,
    )
    json: str = option(
        "",
        "file for the figures as JSON",
        group="bench",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )


class GrammarRun(NamedTuple):
    """The costs of one run."""

    wall_s: float
    cpu_s: float  # processor time of all threads
    num_steps: int
    grammar_s: float  # wall time in which outputs were followed in their grammars
    masks_s: float  # time in which masks were filled, mainly in parallel with the loop
    num_tokens: int


class TimedGrammars:
    """Grammars that measure the time to follow outputs."""

    def __init__(self, grammars: Grammars) -> None:
        self.seconds = 0.0
        self._grammars = grammars

    def ask(self, id: int, key: Key, tenant: str = "") -> None:
        self._grammars.ask(id, key, tenant)

    def cancel(self, id: int) -> None:
        self._grammars.cancel(id)

    def take(self) -> list[CompileResult]:
        return self._grammars.take()

    def advance(
        self, constraints: Sequence[Constraint], tokens: Sequence[int], room: Sequence[int]
    ) -> list[Advance]:
        began = time.perf_counter()
        moves = self._grammars.advance(constraints, tokens, room)
        self.seconds += time.perf_counter() - began
        return moves

    def follow(
        self, constraint: Constraint, tokens: Sequence[int], *, jumps: bool
    ) -> list[LazyBitmaskRow]:
        began = time.perf_counter()
        masks = self._grammars.follow(constraint, tokens, jumps=jumps)
        self.seconds += time.perf_counter() - began
        return masks


class TimedCompiler:
    """A compiler that appends the time of each `fill` to `seconds`. Threads may call it at the same
    time."""

    def __init__(self, compiler: Compiler, seconds: list[float]) -> None:
        self._compiler = compiler
        self._seconds = seconds

    def compile(self, key: Key) -> Compiled:
        return self._compiler.compile(key)

    def fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
        began = time.perf_counter()
        self._compiler.fill(matchers, masks)
        self._seconds.append(time.perf_counter() - began)


class TimedPool(NamedTuple):
    pool: GrammarPool
    mask_seconds: list[float]


def bench_grammar(settings: Settings) -> int:
    options = settings.make(GrammarOptions)
    config = settings.make(EngineConfig)
    schema = SCHEMA
    if options.schema:
        schema = _read(options.schema)
    testbed = Testbed.of(config)
    with (
        _pool(testbed, config, jump=False) as masking,
        _pool(testbed, config, jump=True) as jumping,
    ):
        kinds: dict[str, Callable[[], GrammarRun]] = {
            "free": partial(_run, testbed, options, None, masking),
            "masks": partial(_run, testbed, options, schema, masking),
            "masks, jumps": partial(_run, testbed, options, schema, jumping),
        }
        runs = _measure(kinds, options.repeats)
    size = f"{options.streams} requests, {options.output_len:,} tokens out of each"
    print(f"{testbed.summary}, {size}")
    header = [
        "",
        "output tok/s",
        "of free",
        "CPU ms a step",
        "steps",
        "µs a request and step: grammar",
        "masks",
    ]
    rows: list[list[str]] = []
    results: list[JsonObject] = []
    for kind in kinds:
        figures = _figures(runs[kind], runs["free"], options.streams)
        rows.append([kind, *map(number, figures.values())])
        results.append({"kind": kind, **figures})
    print(table(header, rows))
    write_json(options.json, "grammar", {"model": testbed.summary}, results)
    return 0


def _measure(
    kinds: Mapping[str, Callable[[], GrammarRun]], repeats: int
) -> dict[str, list[GrammarRun]]:
    """Run all kinds in turns, so that a slow minute of the machine affects all of them. The first
    turn warms up."""
    runs: dict[str, list[GrammarRun]] = {kind: [] for kind in kinds}
    for turn in range(repeats + 1):
        for kind, run in kinds.items():
            done = run()
            if turn:
                runs[kind].append(done)
    return runs


def _figures(runs: list[GrammarRun], free: list[GrammarRun], streams: int) -> dict[str, float]:
    """Medians. A ratio compares the runs of one turn."""
    ratios: list[float] = []
    for run, base in zip(runs, free, strict=True):
        ratios.append(base.wall_s / run.wall_s)

    def median(value: Callable[[GrammarRun], float]) -> float:
        return statistics.median(map(value, runs))

    return {
        "output_per_s": median(lambda run: run.num_tokens / run.wall_s),
        "of_free": statistics.median(ratios),
        "cpu_ms_a_step": median(lambda run: 1e3 * run.cpu_s / run.num_steps),
        "steps": median(lambda run: run.num_steps),
        "grammar_us": median(lambda run: 1e6 * run.grammar_s / run.num_steps / streams),
        "masks_us": median(lambda run: 1e6 * run.masks_s / run.num_steps / streams),
    }


def _run(
    testbed: Testbed, options: GrammarOptions, schema: str | None, timed: TimedPool
) -> GrammarRun:
    """Run all requests to their full length. The grammar is compiled before the clock starts."""
    grammars = TimedGrammars(timed.pool)
    engine = testbed.engine(grammars, prefix_cache=False)
    _submit(engine, testbed.settings.vocab_size, options, schema)
    # No steps before the grammar is compiled, because that time belongs to no request.
    while engine.services.grammars.feature.queue and not timed.pool.has_news:
        time.sleep(0.001)
    timed.mask_seconds.clear()
    began_s = time.perf_counter()
    began_cpu_s = time.process_time()
    num_tokens = 0
    while engine.has_work:
        for reply in engine.step():
            if isinstance(reply, StepOutput):
                num_tokens += len(reply.tokens) // 4  # 4 bytes per int32
                _require_length(reply)
    wall_s = time.perf_counter() - began_s
    cpu_s = time.process_time() - began_cpu_s
    return GrammarRun(
        wall_s=wall_s,
        cpu_s=cpu_s,
        num_steps=engine.scheduler.planner.num_steps,
        grammar_s=grammars.seconds,
        masks_s=sum(timed.mask_seconds),
        num_tokens=num_tokens,
    )


def _submit(engine: Engine, vocab_size: int, options: GrammarOptions, schema: str | None) -> None:
    """Submit all requests, each with its own prompt."""
    rng = np.random.default_rng(options.streams)
    grammar = None
    if schema is not None:
        grammar = Grammar("json_schema", schema)
    for id in range(options.streams):
        sampling = SamplingParams(
            max_new_tokens=options.output_len,
            seed=id,
            ignore_eos=True,
            grammar=grammar,
        )
        prompt = rng.integers(0, vocab_size, options.input_len, dtype=np.int32)
        request = GenerateRequest(
            id=id,
            rid=str(id),
            input_ids=prompt.tobytes(),
            sampling=sampling,
        )
        engine.submit(request)


def _require_length(output: StepOutput) -> None:
    """Raise SettingsError if a request has ended before its length, because the times are then
    invalid."""
    for finish in output.finished:
        if finish.reason != "length":
            why = finish.message or "too early"
            raise SettingsError(f"a request ended with {finish.reason}: {why}")


@contextmanager
def _pool(testbed: Testbed, config: EngineConfig, *, jump: bool) -> Iterator[TimedPool]:
    mask_seconds: list[float] = []

    folder = model_folder(with_model(config))

    def compiler() -> Compiler:
        made = make_compiler(
            config.grammar_backend,
            folder / "tokenizer.json",
            testbed.settings.vocab_size,
            testbed.settings.eos_token_ids,
            testbed.threads,
        )
        return TimedCompiler(made, mask_seconds)

    pool = GrammarPool(compiler, max_bytes=64_000_000, jump=jump)
    try:
        yield TimedPool(pool, mask_seconds)
    finally:
        pool.close()


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"--schema: {path} cannot be read: {exc}") from exc


def main(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises SettingsError."""
    command = Command(
        "benchmarks.grammar",
        "What structured output costs: free, under masks, with jumps.",
        GrammarOptions,
        EngineConfig,
        positional="model",
    )
    return run_command(command, bench_grammar, argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SettingsError as problem:
        sys.exit(f"error: {problem}")
