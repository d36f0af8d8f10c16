"""`weft bench freeze`: how long streams stop while prompts of other requests are computed: with the
default settings, and by chunk size and with mixed steps, without other limits on chunks.

Some requests begin to stream, and run alone for a while. Then long prompts arrive, a few at a time;
the next comes when one has received its output. Every variant has the same work, so the throughput
(tokens of all requests, over the time until the last one ends) compares the costs of variants.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.bench.results import write_json
from weft.bench.testbed import Testbed
from weft.config.engine import EngineConfig
from weft.config.numbers import counted
from weft.config.options import Settings, SettingsError, option
from weft.grammar.protocol import NoGrammars
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.settings import SchedulerSettings
from weft.sim.run import SteppableEngine
from weft.sim.table import number, table

NO_GRAMMARS = NoGrammars("this benchmark has none")
SETTLED = 8  # tokens of each stream before the measurement
SETTLING_TOKENS = 16  # part of the context that neither prompts nor outputs use
ALONE = 64  # tokens of each stream that are measured before the first prompt arrives
# Long enough to run when the first prompt arrives, even if a step yields several draft tokens.
SHORTEST_STREAM = SETTLED + ALONE + 24
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class FreezeOptions:
    chunks: str = option(
        "default,512,2048,none",
        "chunk sizes to compare; none: not cut; default: the settings as they are",
        group="bench",
        everyday=True,
    )
    streams: int = option(8, "requests that stream", group="bench", everyday=True, low=1)
    stream_len: int = option(
        512, "tokens that each of them generates", group="bench", everyday=True, low=SHORTEST_STREAM
    )
    prompts: int = option(12, "prompts that arrive in a run", group="bench", everyday=True, low=1)
    prompt_len: int = option(1_500, "their tokens", group="bench", everyday=True, low=1)
    output_len: int = option(
        16, "tokens that each of them generates", group="bench", everyday=True, low=1
    )
    at_once: int = option(2, "of them at a time", group="bench", everyday=True, low=1)
    rounds: int = option(2, "runs of each variant, in turns", group="bench", everyday=True, low=1)
    json: str = option(
        "",
        "file for the figures as JSON",
        group="bench",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )


class FreezeLoad(NamedTuple):
    num_streams: int
    stream_prompt_len: int
    stream_output_len: int
    num_prompts: int
    prompt_len: int
    output_len: int
    at_once: int  # prompts at a time


class PrefillVariant(NamedTuple):
    """One way to prefill. `chunk` is the chunk size; None: prompts are not cut."""

    chunk: int | None
    mixed: bool
    is_default: bool = False  # the settings are unchanged

    @property
    def chunk_name(self) -> str:
        if self.is_default:
            return DEFAULT
        return str(self.chunk or "none")

    @property
    def mixed_name(self) -> str:
        if self.mixed:
            return "on"
        return "off"

    @property
    def name(self) -> str:
        return f"{self.chunk_name}, mixed {self.mixed_name}"


class FreezeRun(NamedTuple):
    """One run. Times in seconds."""

    alone_gaps_s: list[float]  # between two tokens of a stream, before the prompts
    gaps_s: list[float]  # between two tokens of a stream, while there were prompts
    ttft_s: list[float]  # of the prompts
    num_tokens: int  # prompt and generated tokens of the whole run
    seconds: float


class FreezeFigures(NamedTuple):
    """The figures of all runs of a variant."""

    alone_p99_s: float
    p50_s: float
    p99_s: float
    longest_s: float
    ttft_s: float  # median
    tokens_per_s: float

    @property
    def ratio(self) -> float:
        """p99 of the gaps of streams while there are prompts, relative to p99 without prompts."""
        return self.p99_s / self.alone_p99_s


def bench_freeze(settings: Settings) -> int:
    options = settings.make(FreezeOptions)
    config = settings.make(EngineConfig)
    testbed = Testbed.of(config)
    variants = _variants(options.chunks, testbed.settings)
    load = load_of(options, testbed)
    print(testbed.summary)
    prompts = f"{counted(load.num_prompts, 'prompt')} of {counted(load.prompt_len, 'token')}"
    streams = counted(load.num_streams, "stream")
    rounds = counted(options.rounds, "run")
    print(f"{streams}; {prompts}, {load.at_once} at once; {rounds} each")
    runs: dict[PrefillVariant, list[FreezeRun]] = {variant: [] for variant in variants}
    _play(testbed, variants[0], load, 0)  # the very first run is slower
    order = random.Random(0)
    for seed in range(1, options.rounds + 1):
        for variant in order.sample(variants, len(variants)):
            runs[variant].append(_play(testbed, variant, load, seed))
    found: dict[PrefillVariant, FreezeFigures] = {}
    results: list[dict[str, object]] = []
    for variant, played in runs.items():
        one = figures(played)
        found[variant] = one
        results.append({"variant": variant.name, **variant._asdict(), **one._asdict()})
    print(_table(found))
    write_json(options.json, "freeze", {"engine": testbed.summary, **load._asdict()}, results)
    return 0


def figures(runs: list[FreezeRun]) -> FreezeFigures:
    """Figures over the gaps of all runs together; tokens per second are the median of the runs."""
    alone = np.concatenate([run.alone_gaps_s for run in runs])
    gaps = np.concatenate([run.gaps_s for run in runs])
    ttft = np.concatenate([run.ttft_s for run in runs])
    tokens_per_s = [run.num_tokens / run.seconds for run in runs]
    return FreezeFigures(
        alone_p99_s=float(np.percentile(alone, 99)),
        p50_s=float(np.percentile(gaps, 50)),
        p99_s=float(np.percentile(gaps, 99)),
        longest_s=float(gaps.max()),
        ttft_s=float(np.median(ttft)),
        tokens_per_s=float(np.median(tokens_per_s)),
    )


def _variants(chunks: str, settings: SchedulerSettings) -> list[PrefillVariant]:
    """Each chunk size, without mixed steps and with them. Raises SettingsError."""
    variants = []
    for word in chunks.split(","):
        name = word.strip()
        if name == DEFAULT:
            default = PrefillVariant(settings.chunk_len, settings.mixed_chunk, is_default=True)
            variants.append(default)
            continue
        if name == "none":
            size = None
        elif name.isdecimal() and int(name) > 0:
            size = int(name)
        else:
            raise SettingsError(
                f"--chunks has {name!r}; numbers of tokens, none and {DEFAULT} are allowed"
            )
        variants.append(PrefillVariant(size, mixed=False))
        variants.append(PrefillVariant(size, mixed=True))
    return variants


def load_of(options: FreezeOptions, testbed: Testbed) -> FreezeLoad:
    """The load. Raises SettingsError if the engine has no room for it."""
    settings = testbed.settings
    longest = settings.context_length - options.output_len - SETTLING_TOKENS
    if options.prompt_len > longest:
        raise SettingsError(
            f"--prompt-len is {options.prompt_len:,}; at most {longest:,} fit into the context here"
        )
    if options.streams + options.at_once > settings.max_running_requests:
        raise SettingsError(
            f"--streams and --at-once are more than the {settings.max_running_requests} rows"
        )
    longest_stream = settings.context_length - SETTLING_TOKENS
    if options.stream_len > longest_stream:
        raise SettingsError(
            f"--stream-len is {options.stream_len:,}; at most {longest_stream:,} fit into the "
            "context here"
        )
    needed = options.streams * (SETTLING_TOKENS + options.stream_len)
    needed += options.at_once * (options.prompt_len + options.output_len)
    if needed > settings.num_pages * settings.page_size:
        raise SettingsError(f"--kv-tokens {needed:,} is what these streams and prompts need")
    return FreezeLoad(
        num_streams=options.streams,
        stream_prompt_len=SETTLING_TOKENS,
        stream_output_len=options.stream_len,
        num_prompts=options.prompts,
        prompt_len=options.prompt_len,
        output_len=options.output_len,
        at_once=options.at_once,
    )


def _play(testbed: Testbed, variant: PrefillVariant, load: FreezeLoad, seed: int) -> FreezeRun:
    settings = testbed.settings
    engine = testbed.engine(NO_GRAMMARS)
    if not variant.is_default:
        most = variant.chunk or settings.context_length
        engine = testbed.engine(
            NO_GRAMMARS,
            chunked_prefill_size=variant.chunk or -1,
            mixed_chunk=variant.mixed,
            max_slowdown=-1.0,
            max_prefill_tokens=max(settings.max_prefill_tokens, most),
        )
    return LoadPlayer(engine, time.perf_counter, load, settings.vocab_size, seed).play()


def _table(found: Mapping[PrefillVariant, FreezeFigures]) -> str:
    """The table of figures, with throughput relative to the best."""
    best = max(one.tokens_per_s for one in found.values())
    header = [
        "chunk",
        "mixed",
        "p99 alone ms",
        "p50 ms",
        "p99 ms",
        "p99 / alone",
        "longest ms",
        "ttft ms",
        "tokens/s",
        "of the best",
    ]
    rows = []
    for variant, one in found.items():
        row = [
            variant.chunk_name,
            variant.mixed_name,
            number(1e3 * one.alone_p99_s),
            number(1e3 * one.p50_s),
            number(1e3 * one.p99_s),
            number(one.ratio),
            number(1e3 * one.longest_s),
            number(1e3 * one.ttft_s),
            number(one.tokens_per_s),
            f"{one.tokens_per_s / best:.0%}",
        ]
        rows.append(row)
    return table(header, rows)


class LoadPlayer:
    """Runs a load on one engine. `clock` returns seconds."""

    def __init__(
        self,
        engine: SteppableEngine,
        clock: Callable[[], float],
        load: FreezeLoad,
        vocab_size: int,
        seed: int,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._load = load
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        self._next_id = 0
        self._streams: dict[int, float] = {}  # by id: time of its last token
        self._prompts: dict[int, float] = {}  # by id: time at which it was sent
        self._num_outputs: dict[int, int] = defaultdict(int)  # by id
        self._gaps_s: list[float] = []
        self._ttft_s: list[float] = []
        self._num_generated = 0

    def play(self) -> FreezeRun:
        load = self._load
        began_s = self._clock()
        for _ in range(load.num_streams):
            id = self._send(load.stream_prompt_len, load.stream_output_len)
            self._streams[id] = 0.0
        self._stream_until(SETTLED)
        self._gaps_s = []
        self._stream_until(SETTLED + ALONE)
        alone_gaps_s = self._gaps_s
        self._gaps_s = []
        num_sent = 0
        while num_sent < load.num_prompts or self._prompts:
            while num_sent < load.num_prompts and len(self._prompts) < load.at_once:
                id = self._send(load.prompt_len, load.output_len)
                self._prompts[id] = self._clock()
                num_sent += 1
            self._step()
        gaps_s = self._gaps_s
        if not gaps_s:
            raise SettingsError(
                "the streams ended before the prompts arrived; a longer --stream-len is needed"
            )
        self._gaps_s = []
        while self._engine.has_work:
            self._step()
        seconds = self._clock() - began_s
        num_prompt_tokens = load.num_prompts * load.prompt_len
        num_prompt_tokens += load.num_streams * load.stream_prompt_len
        num_tokens = num_prompt_tokens + self._num_generated
        return FreezeRun(alone_gaps_s, gaps_s, self._ttft_s, num_tokens, seconds)

    def _stream_until(self, num_tokens: int) -> None:
        """Run steps until each stream has `num_tokens` tokens."""
        while any(self._num_outputs[id] < num_tokens for id in self._streams):
            self._step()

    def _send(self, prompt_len: int, output_len: int) -> int:
        id = self._next_id
        self._next_id += 1
        tokens = self._rng.integers(0, self._vocab_size, prompt_len)
        sampling = SamplingParams(
            max_new_tokens=output_len, temperature=0.0, seed=id, ignore_eos=True
        )
        request = GenerateRequest(
            id=id,
            rid=str(id),
            input_ids=tokens.astype(np.int32).tobytes(),
            sampling=sampling,
        )
        self._engine.submit(request)
        return id

    def _step(self) -> None:
        replies = self._engine.step()
        now = self._clock()
        for reply in replies:
            if not isinstance(reply, StepOutput):
                continue
            for id in np.frombuffer(reply.ids, dtype=np.int64).tolist():
                self._take(id, now)
            for finish in reply.finished:
                if finish.reason == "error":
                    raise ValueError(finish.message)
                self._end(finish.id)

    def _take(self, id: int, now: float) -> None:
        """Record a token."""
        is_first = not self._num_outputs[id]
        self._num_outputs[id] += 1
        self._num_generated += 1
        if id in self._streams:
            if not is_first:
                self._gaps_s.append(now - self._streams[id])
            self._streams[id] = now
        elif is_first:
            self._ttft_s.append(now - self._prompts[id])

    def _end(self, id: int) -> None:
        self._streams.pop(id, None)
        self._prompts.pop(id, None)
