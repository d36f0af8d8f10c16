"""The verb `sim`: runs a trace through the scheduler in virtual time, with one or several settings.

weft sim --rate 20 --compare policy=fcfs,lpm
weft sim --trace BurstGPT_1.csv --requests 100000 --cost gpu --slo-ttft 1 --slo-itl 0.05
weft sim --replicas 8 --rate 18 --prefixes 200 --turns 4 --router cache_aware,round_robin
weft sim --fit steps.csv
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from weft.cli.film import FilmedEngine, show_film
from weft.config.engine import EngineConfig
from weft.config.media import MediaRules
from weft.config.numbers import MAX_ENGINES, counted
from weft.config.options import (
    Command,
    Config,
    Option,
    SettingsError,
    Value,
    asked_help,
    did_you_mean,
    option,
    options_of,
)
from weft.engine.engine import Engine
from weft.journal.file import MAGIC, JournalError, JournalReader
from weft.journal.replay import BadJournal
from weft.json_types import JsonObject
from weft.route.policy import method_names
from weft.scheduler import policies
from weft.scheduler.pace.step_cost import CostModel
from weft.scheduler.policies.composed.build import why_not
from weft.scheduler.settings import SchedulerSettings, StateSettings
from weft.sim.causes import CauseSums, ExplainedEngine, savings
from weft.sim.changes import changes
from weft.sim.changes import describe as describe_changes
from weft.sim.cluster import simulate_cluster
from weft.sim.cost import PRESETS, read_cost
from weft.sim.encoder import ENCODER_PRESETS, EncoderCost, read_encoder_cost
from weft.sim.files import read_trace
from weft.sim.fit import WatchedCost, fit, fit_encoder, fit_usual, read_steps
from weft.sim.journal import Journal, read_journal
from weft.sim.plot import plot
from weft.sim.report import Slo, Summary, by_tenant, compare, describe, outcomes, summarize
from weft.sim.run import Around, Clock, Record, simulate
from weft.sim.speed import MachineSpeed
from weft.sim.synthetic import (
    BackgroundTraffic,
    PictureTraffic,
    Traffic,
    require_requests,
    synthetic,
    with_batch,
)
from weft.sim.table import number, table
from weft.sim.trace import EOS, VOCAB_SIZE, Arrival

ABOUT = (
    "Try policies and settings on a trace of requests: the real scheduler, a cost model, "
    "virtual time."
)

# Defaults for the scheduler's settings: for settings that have none, or with another value here;
# and values for settings that have no meaning here.
DEFAULTS: dict[str, Value] = {
    "num_pages": 25_000,
    "page_size": 16,
    "max_running_requests": 256,
    "context_length": 131_072,
    "chunked_prefill_size": 2_048,
    "max_queued_requests": 10_000_000,
    "mixed_chunk": False,
    "aging_s": 0.0,
}
SHORT_NAMES = {"schedule_policy": "policy"}  # options that have another name here
# share of a run's time in steps whose cost is a guess; above it, a note is printed
WORTH_SAYING = 0.05
# Where 0 has no meaning here: there is no machine that could choose.
LOWEST = {"num_pages": 1, "page_size": 1, "context_length": 1, "num_stages": 1}
LOWEST |= {"max_running_requests": 1}
FIXED: JsonObject = {"vocab_size": VOCAB_SIZE, "eos_token_ids": (EOS,)}
HELP = {
    "num_pages": "pages of the KV cache",
    "page_size": "tokens per page of the KV cache",
    "context_length": "longest prompt and completion together, in tokens",
    "max_running_requests": "requests that decode together",
    "chunked_prefill_size": "longest piece of a prompt in one step, in tokens; 0 never cuts unless "
    "the time of steps is limited",
    "max_slowdown": "how many times as long steps of running requests may take for prompts that "
    "arrive later, which are cut to fit; 0: no limit",
    "num_layers": "layers of the model, for --split-prefill-layers; 0: a step computes all of them",
    "hidden_size": "values of an input embedding; 0: prompts have none",
    "copies_pages": "requests copy parts of cached pages",
    "num_stages": "parts of a pipeline that work at once (weft serve --pp-size)",
    "max_stage_rows": "largest number of requests that decode in one step with several parts; 0: "
    "no limit",
    "policy": "order of waiting requests: " + ", ".join(policies.names()),
    "state_slots": "states that are kept of layers with a state; 0: the model has none",
}


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    trace: str = option(
        "",
        "file with arrivals: BurstGPT (CSV), Mooncake (JSON lines), or a journal of weft serve, "
        "whose settings are then the defaults",
        group="sim",
        everyday=True,
    )
    speed: float = option(
        1.0, "play the file this number of times as fast", group="sim", everyday=True, low=1e-6
    )
    cost: str = option(
        "auto",
        f"{', '.join(PRESETS)}, or a,b,c[,d]: seconds of a step, and for each token, token of "
        "context and sample in it; auto: fitted to the steps of a journal, without one gpu",
        group="sim",
        everyday=True,
    )
    encoder_cost: str = option(
        "auto",
        f"{', '.join(ENCODER_PRESETS)}, or a,b: seconds of a picture, and for each of its tokens; "
        "auto: fitted to what a journal has of that, without one gpu",
        group="sim",
        everyday=True,
    )
    ttft_ms: int = option(
        0,
        "longest time to the first token, in milliseconds; requests that cannot have it are "
        "refused; 0: any time",
        group="sim",
        everyday=True,
        low=0,
    )
    overlap: bool = option(True, "plan the next step while the device runs this one", group="sim")
    replicas: int = option(
        1,
        "engines behind a router, each with these settings (weft serve --dp-size)",
        group="sim",
        everyday=True,
        low=1,
        high=MAX_ENGINES,
    )
    router: str = option(
        "cache_aware",
        "how it chooses among them, or several ways to compare: " + ", ".join(method_names()),
        group="sim",
        everyday=True,
    )
    compare: str = option(
        "",
        "settings to compare: policy=fcfs,lpm; several (policy=fcfs,lpm page_size=1,16) give all "
        "combinations",
        group="sim",
        everyday=True,
    )
    slo_ttft: float = option(
        0.0, "goodput: seconds to the first token; 0: any", group="sim", everyday=True, low=0.0
    )
    slo_itl: float = option(
        0.0,
        "goodput: mean seconds between tokens of a request; 0: any",
        group="sim",
        everyday=True,
        low=0.0,
    )
    why: bool = option(
        False,
        "print why prompts were not cached, with the share of each cause, and what the settings of "
        "--compare would have saved; without it, what the policy lpm and twice the KV memory would",
        group="sim",
        everyday=True,
    )
    json: str = option(
        "",
        "file for the figures as JSON",
        group="sim",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )
    page: bool = option(
        False,
        "show the run in the browser, step by step (docs/guides/page.md)",
        group="sim",
        everyday=True,
    )
    port: int = option(
        30001,
        "port of the page on this machine; 0 takes a free one",
        group="sim",
        everyday=True,
        low=0,
        high=65535,
    )
    plot: str = option(
        "",
        "file for curves (PNG, SVG, PDF); needs matplotlib",
        group="sim",
        everyday=True,
        judge="weft.config.outputs:wrong_picture",
    )
    ranges: bool = option(
        True,
        "with a journal, also simulate a machine that is as slow, and one that is as fast, as the "
        "recorded one was at times: three runs instead of one",
        group="sim",
        everyday=True,
    )
    fit: str = option(
        "",
        "fit the cost to a file of measured steps (weft bench offline --trace), and end",
        group="sim",
        everyday=True,
    )


def engine_options(defaults: Mapping[str, Value]) -> type[Config]:
    """The scheduler's settings as options: all settings with plain values, also new ones; and the
    number of slots for states."""
    served: dict[str, Option] = {}
    for each in options_of(EngineConfig):
        served[SHORT_NAMES.get(each.name, each.name)] = each
    shown = {
        "policy",
        "num_pages",
        "page_size",
        "max_running_requests",
        "chunked_prefill_size",
        "mixed_chunk",
    }
    columns: list[tuple[str, type, Any]] = []
    for item in fields(SchedulerSettings):
        name = SHORT_NAMES.get(item.name, item.name)
        default = defaults.get(name, item.default)
        is_ours = name == "seed" or name in FIXED
        if is_ours or not isinstance(default, str | int | float | bool):
            continue
        own = served.get(name)
        text = HELP.get(name, name.replace("_", " ") if own is None else own.help)
        column = option(
            default,
            text,
            group="engine",
            everyday=name in shown,
            low=LOWEST.get(name, 0 if own is None else own.low),
            high=None if own is None else own.high,
            aliases=() if name == item.name else (item.name,),
        )
        columns.append((name, type(default), column))
    num_slots = defaults.get("state_slots", 0)
    slots = option(num_slots, HELP["state_slots"], group="engine", low=0)
    columns.append(("state_slots", int, slots))
    return make_dataclass("EngineOptions", columns, frozen=True, kw_only=True)


class SimVariant(NamedTuple):
    """The scheduler's settings of one run. The name says how they differ from the others."""

    name: str
    settings: SchedulerSettings
    router: str = ""  # if there are several engines


class ComparedValue(NamedTuple):
    """One value of a setting in `--compare`."""

    name: str
    value: Value
    text: str  # as the user typed it


def sim(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status."""
    engine = engine_options(DEFAULTS)
    command = Command(
        "weft sim", ABOUT, SimOptions, Traffic, PictureTraffic, BackgroundTraffic, engine
    )
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    settings = command.read(argv, os.environ)
    options = settings.make(SimOptions)
    traffic = settings.make(Traffic)
    pictures = settings.make(PictureTraffic)
    batch = settings.make(BackgroundTraffic)
    if options.fit:
        return _fit(options.fit)
    if pictures.images and options.trace:
        raise SettingsError("--images is of synthetic traffic; a file has its own prompts")
    if not (options.trace or batch.background):
        require_requests(traffic)
    journal = _journal(options.trace)
    fixed = FIXED
    if pictures.images:
        fixed = FIXED | {"media": MediaRules()}
    if journal is not None:
        engine = engine_options(_plain(journal.settings))
        recorded_settings = journal.settings
        fixed = FIXED | {
            "vocab_size": recorded_settings.vocab_size,
            "media": recorded_settings.media,
        }
    cost = _cost(options.cost, journal)
    encoder_cost = _encoder_cost(options.encoder_cost, journal)
    slo = Slo(options.slo_ttft or float("inf"), options.slo_itl or float("inf"))
    variants = _variants(vars(settings.make(engine)) | fixed, options.compare, options_of(engine))
    variants = _routed(variants, options)
    if options.why and options.replicas > 1:
        raise SettingsError("--why explains one engine: leave --replicas out")
    records = []
    filmed: list[FilmedEngine] = []
    if options.page and len(variants) > 1:
        raise SettingsError("--page shows one run: leave --compare out")
    if options.page and options.why:
        raise SettingsError("--page shows a run, and --why explains one: leave one of them out")
    if options.page and options.replicas > 1:
        raise SettingsError("--page shows one engine: leave --replicas out")
    trial = Trial(options, traffic, pictures, batch, journal, cost, encoder_cost)
    notes: list[str] = []
    ranges: list[FigureRange] = []
    for variant in variants:
        played = trial.play(variant, filmed)
        records.append(played.record)
        if played.note:
            notes.append(f"{variant.name or 'simulated'}: {played.note}")
        found = trial.range_of(variant, slo)
        if found is not None:
            ranges.append(found)
    summaries = [summarize(record, slo) for record in records]
    recorded = None
    if journal is not None:
        recorded = summarize(journal.record, slo)
        print(_beside_recorded(recorded, summaries[0]))
    _print(variants, records, summaries)
    if ranges:
        print(f"\n{_range_table(variants, ranges)}")
    for note in notes:
        print(note)
    _print_outcomes(variants, summaries, recorded)
    if journal is not None and recorded is not None:
        tenants = by_tenant(journal.record)
        if tenants:
            print(f"\nrecorded\n{tenants}")
    for variant, record in zip(variants, records, strict=True):
        tenants = by_tenant(record)
        if tenants:
            print(f"\n{variant.name or 'simulated'}\n{tenants}")
    if options.why:
        _print_why(trial, variants, records)
    if options.json:
        _write_json(options, cost, variants, records, summaries, recorded)
    if options.plot:
        plot(options.plot, [variant.name for variant in variants], records)
    if filmed:
        summary = f"cost {options.cost}, policy {variants[0].settings.schedule_policy}"
        show_film(filmed[0].film("weft sim", summary), options.port)
    return 0


def _print_why(trial: Trial, variants: Sequence[SimVariant], records: Sequence[Record]) -> None:
    """Print the causes of each run, and what the others would have saved against the first."""
    for variant in variants:
        print(f"\n{variant.name or 'simulated'}\n{trial.causes[variant.name].lines()}")
    names = [variant.name for variant in variants]
    compared = list(records)
    if len(variants) == 1:
        for other in _alternatives(variants[0].settings):
            names.append(other.name)
            compared.append(trial.play(other, []).record)
    print()
    for line in savings(names, compared):
        print(line)


def _alternatives(settings: SchedulerSettings) -> list[SimVariant]:
    """The settings that are tried beside a single run."""
    found = []
    if settings.schedule_policy != "lpm":
        found.append(SimVariant("lpm", replace(settings, schedule_policy="lpm")))
    larger = replace(settings, num_pages=2 * settings.num_pages)
    found.append(SimVariant("twice the KV memory", larger))
    return found


def _variants(base: dict[str, Value], text: str, options: Sequence[Option]) -> list[SimVariant]:
    """One variant for each combination of the values in `text`. Raises SettingsError."""
    known = {name: each for each in options for name in (each.name, *each.aliases)}
    axes: list[list[ComparedValue]] = []
    for word in text.split():
        name, equals, values = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if not equals:
            raise SettingsError(
                f"--compare has {word!r}; a setting and its values (policy=fcfs,lpm) are expected"
            )
        if name not in known:
            raise SettingsError(
                f"--compare: there is no setting {name!r}{did_you_mean(name, known)} "
                "(weft sim --help all)"
            )
        chosen = known[name]
        axis = []
        for value in values.split(","):
            read = chosen.from_text(value, f"--compare {name}")
            axis.append(ComparedValue(chosen.name, read, value))
        axes.append(axis)
    variants = []
    for values_of_run in itertools.product(*axes):
        name = " ".join(f"{each.name}={each.text}" for each in values_of_run)
        changed = {each.name: each.value for each in values_of_run}
        variants.append(SimVariant(name, _settings(base | changed)))
    return variants


def _routed(variants: list[SimVariant], options: SimOptions) -> list[SimVariant]:
    """Each variant with each router of `--router`. Raises SettingsError."""
    routers = options.router.split(",")
    for router in routers:
        if router not in method_names():
            raise SettingsError(
                f"--router: there is no router {router!r}{did_you_mean(router, method_names())} "
                f"(there are {', '.join(method_names())})"
            )
    if options.replicas == 1:
        return variants
    found = []
    for variant in variants:
        for router in routers:
            name = variant.name
            if len(routers) > 1:
                name = f"{name} router={router}".strip()
            found.append(SimVariant(name, variant.settings, router))
    return found


def _settings(values: JsonObject) -> SchedulerSettings:
    wrong = why_not(values["policy"])
    if wrong:
        raise SettingsError(f"--policy is {values['policy']!r}; {wrong}")
    named = dict(values)
    for name, short in SHORT_NAMES.items():
        named[name] = named.pop(short)
    num_slots = named.pop("state_slots")
    states = StateSettings(num_slots=num_slots) if num_slots else None
    try:
        return SchedulerSettings(states=states, **named)
    except ValueError as exc:
        raise SettingsError(str(exc)) from exc


class Played(NamedTuple):
    """One run, and a note about it."""

    record: Record
    note: str


class FigureRange(NamedTuple):
    """The figures of a run on a slower machine, and on a faster one."""

    slow: Summary
    fast: Summary


class Trial:
    """Runs the trace with each variant."""

    def __init__(
        self,
        options: SimOptions,
        traffic: Traffic,
        pictures: PictureTraffic,
        batch: BackgroundTraffic,
        journal: Journal | None,
        cost: CostModel,
        encoder_cost: EncoderCost,
    ) -> None:
        self._options = options
        self._traffic = traffic
        self._pictures = pictures
        self._batch = batch
        self._encoder_cost = encoder_cost
        self._journal = journal
        self._cost = cost
        self._overlaps = options.overlap
        self.causes: dict[str, CauseSums] = {}  # of each variant, with --why
        self._speed: MachineSpeed | None = None
        if journal is not None:
            self._overlaps = options.overlap and journal.overlaps
            # A given cost belongs to another machine, or to another time.
            if options.cost == "auto" and journal.steps and options.replicas == 1:
                self._speed = journal.speed(cost)

    def play(self, variant: SimVariant, filmed: list[FilmedEngine]) -> Played:
        """Run one variant. With `--page`, its engine is added to `filmed`."""

        def film(engine: Engine, clock: Clock) -> FilmedEngine:
            filmed.append(FilmedEngine(engine, clock))
            return filmed[0]

        sums = self.causes.setdefault(variant.name, CauseSums())

        def explained(engine: Engine, clock: Clock) -> ExplainedEngine:
            return ExplainedEngine(engine, clock, sums)

        around: Around | None = None
        if self._options.page:
            around = film
        elif self._options.why:
            around = explained
        began = time.perf_counter()
        note = ""
        if variant.router:
            record = simulate_cluster(
                variant.settings,
                self._cost,
                self._arrivals(),
                num_replicas=self._options.replicas,
                method=variant.router,
                overlap=self._overlaps,
                encoder_cost=self._encoder_cost,
            )
        else:
            steps = [] if self._journal is None else self._journal.steps
            watched = WatchedCost(self._cost, steps)
            record = simulate(
                variant.settings,
                watched,
                self._arrivals(),
                overlap=self._overlaps,
                around=around,
                speed=self._speed,
                encoder_cost=self._encoder_cost,
            )
            if self._speed is not None and watched.guessed_share > WORTH_SAYING:
                note = (
                    f"{watched.guessed_share:.0%} of its time is in steps larger than any that was "
                    "recorded: their cost is a guess"
                )
        took = time.perf_counter() - began
        name = variant.name or "simulated"
        print(f"{name}: {counted(len(record), 'request')} in {took:.1f} s", file=sys.stderr)
        return Played(record, note)

    def range_of(self, variant: SimVariant, slo: Slo) -> FigureRange | None:
        """The range of a variant's figures: on a machine at the recorded machine's slowest and
        fastest speed. None if that speed is not known, or the range was not requested."""
        if self._speed is None or not self._options.ranges or self._options.page:
            return None
        spread = self._speed.spread()
        found = []
        for factor in spread:
            record = simulate(
                variant.settings,
                self._cost,
                self._arrivals(),
                overlap=self._overlaps,
                speed=self._speed.times(factor),
                encoder_cost=self._encoder_cost,
            )
            found.append(summarize(record, slo))
        return FigureRange(*found)

    def _arrivals(self) -> Iterator[Arrival]:
        arrivals = _arrivals(self._options, self._traffic, self._pictures, self._journal)
        if self._batch.background:
            arrivals = with_batch(arrivals, self._batch, self._traffic.traffic_seed)
        for arrival in arrivals:
            if self._options.ttft_ms:
                arrival = arrival._replace(ttft_ms=self._options.ttft_ms)
            yield arrival


def _range_table(variants: Sequence[SimVariant], ranges: Sequence[FigureRange]) -> str:
    header = ["as slow ... as fast as it was at times"]
    header += ["output tokens/s", "TTFT p50, ms", "ITL p50, ms", "E2E p50, ms"]
    rows = []
    for variant, found in zip(variants, ranges, strict=True):
        cells = [variant.name or "simulated"]
        for slow, fast in zip(_main_figures(found.slow), _main_figures(found.fast), strict=True):
            cells.append(f"{number(slow)} ... {number(fast)}")
        rows.append(cells)
    return table(header, rows)


def _main_figures(summary: Summary) -> list[float]:
    """Output tokens per second; TTFT, ITL and E2E p50 in milliseconds."""
    times = [summary.ttft_s[0], summary.itl_s[0], summary.e2e_s[0]]
    return [summary.output_per_s, *[1e3 * time_s for time_s in times]]


def _cost(text: str, journal: Journal | None) -> CostModel:
    """Raises SettingsError."""
    if text != "auto":
        return read_cost(text)
    if journal is None or not journal.steps:
        return PRESETS["gpu"]
    fitted = fit_usual(journal.steps)
    print(
        f"fitted to the journal: --cost {fitted.text}, {fitted.num_steps:,} steps, half of them "
        f"met to {fitted.median_error:.0%}",
        file=sys.stderr,
    )
    return fitted.cost


def _encoder_cost(text: str, journal: Journal | None) -> EncoderCost:
    """Raises SettingsError."""
    if text != "auto":
        return read_encoder_cost(text)
    if journal is None or not journal.encoder:
        return ENCODER_PRESETS["gpu"]
    fitted = fit_encoder(journal.encoder)
    num_items = sum(one.num_items for one in journal.encoder)
    print(
        f"fitted to the journal: --encoder-cost {fitted.text}, {num_items:,} runs of the encoder",
        file=sys.stderr,
    )
    return fitted


def _beside_recorded(recorded: Summary, simulated: Summary) -> str:
    """A table of the recorded run and of its simulation with the first settings, figure by
    figure."""
    rows = []
    names = ["output tokens/s", "TTFT p50, ms", "ITL p50, ms", "E2E p50, ms"]
    pairs = zip(names, _main_figures(recorded), _main_figures(simulated), strict=True)
    for name, was, now in pairs:
        change = "-"
        if was > 0 and now == now:
            change = f"{now / was - 1:+.1%}"
        rows.append([name, number(was), number(now), change])
    return table(["", "recorded", "simulated", ""], rows) + "\n"


def _print_outcomes(
    variants: Sequence[SimVariant], summaries: Sequence[Summary], recorded: Summary | None
) -> None:
    """Print the outcomes of the requests in each run, the recorded run first. Prints nothing if all
    requests finished, or if there is only one run, whose summary has them."""
    names = [variant.name or "simulated" for variant in variants]
    runs = list(summaries)
    if recorded is not None:
        names.insert(0, "recorded")
        runs.insert(0, recorded)
    if len(runs) > 1 and any(run.finished < run.requests for run in runs):
        print(f"\n{outcomes(names, runs)}")


def _arrivals(
    options: SimOptions, traffic: Traffic, pictures: PictureTraffic, journal: Journal | None
) -> Iterator[Arrival]:
    """The arrivals of the trace, from its beginning."""
    if journal is not None:
        faster = (
            arrival._replace(time_s=arrival.time_s / options.speed) for arrival in journal.arrivals
        )
        return islice(faster, traffic.requests or None)
    if options.trace:
        arrivals = read_trace(options.trace, max_tokens=traffic.max_tokens, speed=options.speed)
        return islice(arrivals, traffic.requests or None)
    return synthetic(traffic, pictures=pictures)


def _journal(name: str) -> Journal | None:
    """The requests of a journal; None for another file. Raises SettingsError if it cannot be
    replayed."""
    try:
        if not name or not _begins_with(name, MAGIC):
            return None
        with JournalReader(Path(name)) as reader:
            journal = read_journal(reader)
    except OSError as exc:
        raise SettingsError(f"cannot read the trace {name}: {exc.strerror}") from exc
    except (JournalError, BadJournal) as exc:
        raise SettingsError(f"cannot read the trace {name}: {exc}") from exc
    if reader.damage is not None:
        print(
            f"{name} is damaged at {reader.damage}; the requests after that are left out",
            file=sys.stderr,
        )
    notes = [
        (journal.num_open, "open at the end, left out"),
        (journal.num_invalid, "invalid under any settings, left out"),
        (journal.num_guessed, "without an end: the length of the output is guessed"),
    ]
    for num, words in notes:
        if num:
            print(f"{counted(num, 'request')} {words}", file=sys.stderr)
    if not journal.arrivals:
        raise SettingsError(f"{name} has no requests; 1 or more are needed")
    return journal


def _begins_with(name: str, magic: bytes) -> bool:
    with open(name, "rb") as file:
        return file.read(len(magic)) == magic


def _plain(settings: SchedulerSettings) -> dict[str, Value]:
    """A journal's settings as defaults of the options."""
    values: dict[str, Value] = {}
    for item in fields(settings):
        values[SHORT_NAMES.get(item.name, item.name)] = getattr(settings, item.name)
    if settings.states is not None:
        values["state_slots"] = settings.states.num_slots
    return values


def _print(
    variants: Sequence[SimVariant], records: Sequence[Record], summaries: Sequence[Summary]
) -> None:
    if len(variants) == 1:
        print(describe(summaries[0]))
        if records[0].machine.num_expected:
            print(_waits(records[0]))
        return
    print(compare([variant.name for variant in variants], summaries))
    for variant, record in list(zip(variants, records, strict=True))[1:]:
        print()
        print(describe_changes(variant.name, variants[0].name, changes(records[0], record)))


def _waits(record: Record) -> str:
    """The share of first tokens whose time was estimated well."""
    machine = record.machine
    num = machine.num_expected
    within = machine.num_within / num
    return f"waits        {within:.1%} of {num:,} within the band that was expected"


def _write_json(
    options: SimOptions,
    cost: CostModel,
    variants: Sequence[SimVariant],
    records: Sequence[Record],
    summaries: Sequence[Summary],
    recorded: Summary | None,
) -> None:
    runs = []
    for variant, record, summary in zip(variants, records, summaries, strict=True):
        changed = changes(records[0], record)
        worst = [change._asdict() for change in changed.worst]
        run = {
            "name": variant.name,
            "replicas": options.replicas,
            "router": variant.router,
            "settings": asdict(variant.settings),
            "figures": summary.to_dict(),
            "against_first": changed._asdict() | {"worst": worst},
        }
        runs.append(run)
    found: JsonObject = {"cost": cost._asdict()}
    if recorded is not None:
        found["recorded"] = recorded.to_dict()
    try:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found | {"runs": runs}, file, indent=1)
    except OSError as exc:
        raise SettingsError(f"cannot write {options.json}: {exc.strerror}") from exc


def _fit(name: str) -> int:
    try:
        found = fit(read_steps(name))
    except OSError as exc:
        raise SettingsError(f"--fit: cannot read {name}: {exc.strerror}") from exc
    except ValueError as exc:
        raise SettingsError(f"cannot fit the cost: {exc}") from exc
    print(f"--cost {found.text}")
    print(
        f"{found.num_steps:,} steps; their sum is met to {found.total_error:+.1%}, "
        f"half of them to {found.median_error:.1%}",
        file=sys.stderr,
    )
    return 0
