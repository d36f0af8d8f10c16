"""How long streams stand still while prompts are computed, by chunk size and with mixed steps."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from weft.bench.freeze import Figures, Load, Player, Trial, Variant, figures
from weft.cli.benches.report import write_json
from weft.cli.benches.testbed import Testbed
from weft.config.engine import EngineConfig
from weft.config.options import Settings, SettingsError, option
from weft.grammar.protocol import NoGrammars
from weft.sim.table import number, table

NO_GRAMMARS = NoGrammars("this benchmark has none")
SETTLING_TOKENS = 16  # of a context that neither prompt nor output may have


@dataclass(frozen=True, kw_only=True)
class FreezeBench:
    chunks: str = option(
        "256,512,1024,2048,4096,none",
        "chunk sizes to compare; none: not cut",
        group="bench",
        everyday=True,
    )
    streams: int = option(
        8, "requests that stream all the while", group="bench", everyday=True, low=1
    )
    prompts: int = option(12, "prompts that come in a run", group="bench", everyday=True, low=1)
    prompt_len: int = option(1_500, "their tokens", group="bench", everyday=True, low=1)
    output_len: int = option(
        16, "tokens that each of them generates", group="bench", everyday=True, low=1
    )
    at_once: int = option(2, "of them at a time", group="bench", everyday=True, low=1)
    rounds: int = option(2, "runs of each variant, in turns", group="bench", everyday=True, low=1)
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)


def bench_freeze(settings: Settings) -> int:
    options, config = settings.make(FreezeBench), settings.make(EngineConfig)
    variants = [
        Variant(chunk, mixed) for chunk in _chunks(options.chunks) for mixed in (False, True)
    ]
    testbed = Testbed.of(config)
    load = _load(options, testbed)
    print(testbed.summary)
    prompts = f"{load.num_prompts} prompts of {load.prompt_len:,} tokens, {load.at_once} at once"
    print(f"{load.num_streams} streams; {prompts}; {options.rounds} runs each")
    trials: dict[Variant, list[Trial]] = {variant: [] for variant in variants}
    _play(testbed, variants[0], load, 0)  # what is done for the first time takes longer
    order = random.Random(0)
    for number_of_round in range(options.rounds):
        for variant in order.sample(variants, len(variants)):
            trials[variant].append(_play(testbed, variant, load, 1 + number_of_round))
    found = {variant: figures(runs) for variant, runs in trials.items()}
    print(_table(found))
    results = [
        {"variant": variant.name, **variant._asdict(), **one._asdict()}
        for variant, one in found.items()
    ]
    write_json(options.json, "freeze", {"engine": testbed.summary, **load._asdict()}, results)
    return 0


def _chunks(names: str) -> list[int | None]:
    """Raises SettingsError."""
    sizes: list[int | None] = []
    for name in names.split(","):
        if name.strip() == "none":
            sizes.append(None)
        elif name.strip().isdecimal() and int(name) > 0:
            sizes.append(int(name))
        else:
            raise SettingsError(
                f"--chunks has {name.strip()!r}; numbers of tokens and none are allowed"
            )
    return sizes


def _load(options: FreezeBench, testbed: Testbed) -> Load:
    """Raises SettingsError if the engine has no room for it."""
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
    stream_output_len = settings.context_length // 2
    whole = options.streams * settings.context_length + options.at_once * (
        options.prompt_len + options.output_len
    )
    if whole > settings.num_pages * settings.page_size:
        raise SettingsError(f"--kv-tokens {whole:,} is what these streams and prompts need")
    return Load(
        num_streams=options.streams,
        stream_prompt_len=SETTLING_TOKENS,
        stream_output_len=stream_output_len,
        num_prompts=options.prompts,
        prompt_len=options.prompt_len,
        output_len=options.output_len,
        at_once=options.at_once,
    )


def _play(testbed: Testbed, variant: Variant, load: Load, seed: int) -> Trial:
    most = testbed.settings.context_length if variant.chunk is None else variant.chunk
    engine = testbed.engine(
        NO_GRAMMARS,
        chunked_prefill_size=variant.chunk,
        mixed_chunk=variant.mixed,
        max_prefill_tokens=max(testbed.settings.max_prefill_tokens, most),
    )
    return Player(engine, time.perf_counter, load, testbed.settings.vocab_size, seed).play()


def _table(found: dict[Variant, Figures]) -> str:
    """Throughput is compared with the best."""
    best = max(one.tokens_per_s for one in found.values())
    header = [
        "chunk",
        "mixed",
        "itl p50 ms",
        "p99 ms",
        "p99 / p50",
        "longest ms",
        "ttft ms",
        "tokens/s",
        "of the best",
    ]
    rows = [
        [
            str(variant.chunk or "none"),
            "on" if variant.mixed else "off",
            *(number(1e3 * seconds) for seconds in (one.p50_s, one.p99_s)),
            number(one.ratio),
            *(number(1e3 * seconds) for seconds in (one.longest_s, one.ttft_s)),
            number(one.tokens_per_s),
            f"{one.tokens_per_s / best:.0%}",
        ]
        for variant, one in found.items()
    ]
    return table(header, rows)
