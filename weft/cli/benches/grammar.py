"""What structured output costs: the same requests written freely, under a grammar's masks, and with its jumps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.cli.benches.report import write_json
from weft.cli.benches.testbed import Testbed
from weft.config.engine import EngineConfig
from weft.config.options import Settings, SettingsError, option
from weft.engine.engine import Engine
from weft.executor.weights.fetch import local_folder
from weft.grammar.backends import make_compiler
from weft.grammar.masks import Words
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
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import Grammar, SamplingParams
from weft.sim.table import number, table

# A list that goes on for ever, of objects with long names: text of the model's own between text that must follow.
SCHEMA = """{"type": "array", "minItems": 100000, "items": {"type": "object", "properties": {
    "customer_reference_number": {"type": "integer", "minimum": 0},
    "shipping_address_city": {"type": "string", "maxLength": 40},
    "preferred_delivery_window": {"enum": ["in the morning", "in the afternoon", "in the evening"]},
    "is_returning_customer": {"type": "boolean"}
}, "required": ["customer_reference_number", "shipping_address_city", "preferred_delivery_window",
    "is_returning_customer"], "additionalProperties": false}}"""


@dataclass(frozen=True, kw_only=True)
class GrammarBench:
    streams: int = option(16, "how many requests at once", group="bench", everyday=True, low=1)
    input_len: int = option(32, "tokens of each prompt", group="bench", everyday=True, low=1)
    output_len: int = option(192, "tokens of each completion", group="bench", everyday=True, low=2)
    schema: str = option(
        "", "file with a JSON schema whose texts do not end before", group="bench", everyday=True
    )
    repeats: int = option(
        7, "measured runs of each kind; one more goes before", group="bench", everyday=True, low=1
    )
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)


class Cost(NamedTuple):
    """Of one run."""

    wall_s: float
    cpu_s: float  # of all threads
    num_steps: int
    grammar_s: float  # of the wall's, in which the outputs were followed in their grammars
    masks_s: float  # in which masks were filled, mostly beside the loop
    num_tokens: int


class TimedGrammars:
    """Grammars that count how long they take to follow outputs."""

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


class TimedCompiler:
    """A compiler that keeps in `seconds` how long it takes to fill masks. Threads may do so at the same time."""

    def __init__(self, compiler: Compiler, seconds: list[float]) -> None:
        self._compiler = compiler
        self._seconds = seconds

    def compile(self, key: Key) -> Compiled:
        return self._compiler.compile(key)

    def fill(self, matchers: Sequence[GrammarMatcher], masks: Words) -> None:
        began = time.perf_counter()
        self._compiler.fill(matchers, masks)
        self._seconds.append(time.perf_counter() - began)


class Timed(NamedTuple):
    pool: GrammarPool
    mask_seconds: list[float]


def bench_grammar(settings: Settings) -> int:
    options, config = settings.make(GrammarBench), settings.make(EngineConfig)
    schema = _read(options.schema) if options.schema else SCHEMA
    testbed = Testbed.of(config)
    with (
        _pool(testbed, config, jump=False) as masking,
        _pool(testbed, config, jump=True) as jumping,
    ):
        kinds: dict[str, Callable[[], Cost]] = {
            "free": partial(_run, testbed, options, None, masking),
            "masks": partial(_run, testbed, options, schema, masking),
            "masks, jumps": partial(_run, testbed, options, schema, jumping),
        }
        costs: dict[str, list[Cost]] = {kind: [] for kind in kinds}
        for turn in range(options.repeats + 1):
            for kind, run in kinds.items():  # in turns, so that a slow minute falls on all
                cost = run()
                if turn:  # the first warms up
                    costs[kind].append(cost)
    print(
        f"{testbed.summary}, {options.streams} requests, {options.output_len:,} tokens out of each"
    )
    header = [
        "",
        "output tok/s",
        "of free",
        "CPU ms a step",
        "steps",
        "µs a request and step: grammar",
        "masks",
    ]
    figures = {kind: _figures(runs, costs["free"], options.streams) for kind, runs in costs.items()}
    print(table(header, [[kind, *map(number, one.values())] for kind, one in figures.items()]))
    results: list[dict[str, Any]] = [{"kind": kind, **one} for kind, one in figures.items()]
    write_json(options.json, "grammar", {"model": testbed.summary}, results)
    return 0


def _figures(runs: list[Cost], free: list[Cost], streams: int) -> dict[str, float]:
    """Medians. The ratio is that of the runs of one turn."""
    median = statistics.median
    ratios = [base.wall_s / cost.wall_s for cost, base in zip(runs, free, strict=True)]
    return {
        "output_per_s": median(cost.num_tokens / cost.wall_s for cost in runs),
        "of_free": median(ratios),
        "cpu_ms_a_step": median(1e3 * cost.cpu_s / cost.num_steps for cost in runs),
        "steps": median(cost.num_steps for cost in runs),
        "grammar_us": median(1e6 * cost.grammar_s / cost.num_steps / streams for cost in runs),
        "masks_us": median(1e6 * cost.masks_s / cost.num_steps / streams for cost in runs),
    }


def _run(testbed: Testbed, options: GrammarBench, schema: str | None, timed: Timed) -> Cost:
    """Let all requests run to their length. The grammar is compiled before the clock starts."""
    pool, mask_seconds = timed
    grammars = TimedGrammars(pool)
    engine = testbed.engine(grammars, prefix_cache=False)
    rng = np.random.default_rng(options.streams)
    for id in range(options.streams):
        sampling = SamplingParams(
            max_new_tokens=options.output_len,
            seed=id,
            ignore_eos=True,
            grammar=None if schema is None else Grammar("json_schema", schema),
        )
        prompt = rng.integers(0, testbed.settings.vocab_size, options.input_len, dtype=np.int32)
        engine.submit(
            GenerateRequest(id=id, rid=f"{id}", input_ids=prompt.tobytes(), sampling=sampling)
        )
    _until_compiled(engine, pool)
    mask_seconds.clear()
    began, cpu_s = time.perf_counter(), time.process_time()
    num_tokens = 0
    while engine.has_work:
        for reply in engine.step():
            if isinstance(reply, StepOutput):
                num_tokens += len(reply.tokens) // 4
                if failed := [finish for finish in reply.finished if finish.reason != "length"]:
                    raise SettingsError(
                        f"a request ended with {failed[0].reason}: {failed[0].message or 'too early'}"
                    )
    return Cost(
        time.perf_counter() - began,
        time.process_time() - cpu_s,
        engine.scheduler.num_steps,
        grammars.seconds,
        sum(mask_seconds),
        num_tokens,
    )


def _until_compiled(engine: Engine, pool: GrammarPool) -> None:
    while engine.grammar.queue and not pool.has_news:
        time.sleep(0.001)


@contextmanager
def _pool(testbed: Testbed, config: EngineConfig, *, jump: bool) -> Iterator[Timed]:
    tokenizer = local_folder(config.model, config.revision) / "tokenizer.json"
    vocab_size, eos_token_ids = testbed.settings.vocab_size, testbed.settings.eos_token_ids
    vocabulary = config.grammar_backend, tokenizer, vocab_size, eos_token_ids, testbed.threads
    mask_seconds: list[float] = []
    pool = GrammarPool(
        lambda: TimedCompiler(make_compiler(*vocabulary), mask_seconds),
        max_bytes=64_000_000,
        jump=jump,
    )
    try:
        yield Timed(pool, mask_seconds)
    finally:
        pool.close()


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"--schema: {path} cannot be read: {exc}") from exc
