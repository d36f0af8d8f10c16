"""The verb `replay`: run the scheduler over a journal (`weft serve --journal FILE`), without a
model.

Every decision must equal the recorded one, bit for bit. Exit status: 0 if so, 1 if not, 2 if the
file cannot be replayed completely, or at all, because it is damaged. After damage, the replay
continues at the next state of the engine in the file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weft.cli.film import Camera, Film, show_film
from weft.cli.why import causes
from weft.config.numbers import counted
from weft.config.options import Command, SettingsError, asked_help, option
from weft.engine import explain as insight
from weft.journal.file import MAGIC, Damage, JournalError, JournalReader
from weft.journal.records import BEGINNING
from weft.journal.replay import BadJournal, Replay, last_beginning
from weft.messages.control import Explanation
from weft.observe import log
from weft.scheduler.policies.composed.shadowed import Shadowed
from weft.version import __version__

MAX_SHADOWED = 20  # requests that the report lists

ABOUT = (
    "Run the scheduler over the journal FILE, without a model: every decision must be the "
    "recorded one."
)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    file: str = option(
        "", "journal that weft serve --journal FILE has written", group="replay", everyday=True
    )
    until: int = option(
        -1,
        "stop after this step, and show what it did; -1: at the end",
        group="replay",
        everyday=True,
        low=-1,
    )
    rid: str = option(
        "",
        "show what happened to the requests of this name, and why",
        group="replay",
        everyday=True,
    )
    why: str = option(
        "",
        "show why the requests of this name were slow: the cause of what they missed in the cache, "
        "and where their time went",
        group="replay",
        everyday=True,
    )
    shadow: str = option(
        "",
        "let this policy decide beside the recorded one, without effect, and show what it would "
        "have changed",
        group="replay",
        everyday=True,
        judge="weft.scheduler.policies.composed.build:why_no_shadow",
    )
    check: bool = option(
        False, "check who owns each page after every step", group="replay", everyday=True
    )
    page: bool = option(
        False,
        "show the recording in the browser, step by step (docs/guides/page.md)",
        group="replay",
        everyday=True,
    )
    since: int = option(
        0, "the first step that the page shows", group="replay", everyday=True, low=0
    )
    port: int = option(
        30001,
        "port of the page on this machine; 0 takes a free one",
        group="replay",
        everyday=True,
        low=0,
        high=65535,
    )


def replay(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status. Raises SettingsError for a file that cannot be
    replayed."""
    command = Command("weft replay", ABOUT, ReplayOptions, positional="file")
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    options = command.read(argv, os.environ).make(ReplayOptions)
    if not options.file:
        raise SettingsError("no journal is given: weft replay FILE")
    try:
        with log.silent(), JournalReader(Path(options.file)) as reader:
            return _replay(reader, options)
    except JournalError as exc:
        raise SettingsError(str(exc)) from exc
    except BadJournal as exc:
        raise SettingsError(f"{options.file} cannot be replayed: {exc}") from exc


def _replay(reader: JournalReader, options: ReplayOptions) -> int:
    """Replay the undamaged parts of the file. Returns the exit status."""
    if options.page:
        return _show(reader, options)
    damage: list[Damage] = []
    if options.until >= 0:
        start, damage = last_beginning(reader, options.until)
        reader.go_to(start)
        print("".join(f"the journal is damaged at {one}\n" for one in damage), end="")
    while True:
        is_same = _replay_stretch(reader, options)
        if not is_same:
            return 1
        if reader.damage is None:
            break
        damage.append(reader.damage)
        if not reader.resume(BEGINNING):
            print("there is no later state of the engine from which a replay could continue")
            break
    if damage:
        return 2
    return 0


def _replay_stretch(reader: JournalReader, options: ReplayOptions) -> bool:
    """Replay from a state of the engine to the end or the next damage. Returns whether everything
    equals the record."""
    began = time.perf_counter()
    offset = reader.offset
    try:
        run = Replay(reader, check=options.check, shadow=options.shadow)
    except BadJournal:
        if reader.damage is None:
            raise
        print(f"the journal is damaged at {reader.damage}")
        return True
    print(_beginning(run, offset), flush=True)
    if 0 <= options.until < run.first_step:
        print(f"step {options.until:,} is in the damaged part of the journal")
        return True
    if options.until >= 0:
        is_same = run.run(options.until)
        print("\n".join(describe_step(run)))
    else:
        is_same = run.run(None)
    if options.rid:
        print("\n".join(describe_requests(run, options.rid)))
    if options.why:
        print("\n".join(describe_why(run, options.why)))
    if options.shadow:
        print("\n".join(describe_shadow(run)))
    if is_same and options.until < 0:
        _read_the_rest(reader)
    print(_last_line(run, reader, time.perf_counter() - began))
    return is_same


def _show(reader: JournalReader, options: ReplayOptions) -> int:
    """Replay with a camera on the engine, up to the end or the first damage; then show the film.
    Returns the exit status."""
    began = time.perf_counter()
    start, _ = last_beginning(reader, options.since)
    reader.go_to(start)
    run = Replay(reader, check=options.check)
    beginning = _beginning(run, start)
    print(beginning, flush=True)
    camera = Camera(run.engine, options.since)
    is_same = True
    while options.until < 0 or run.step <= options.until:
        before = run.step
        is_same = run.run(before)
        camera.look(run.last_s)
        if not is_same or run.step == before:
            break
    print(_last_line(run, reader, time.perf_counter() - began), flush=True)
    film = Film(
        title=Path(options.file).name,
        summary=beginning,
        frames=camera.frames,
        stride=camera.stride,
        tell=lambda rid: insight.trace_request_flow(run.engine.scheduler, rid, run.last_s),
        journals=(str(Path(options.file).absolute()),),
    )
    show_film(film, options.port)
    return 0 if is_same else 1


def _read_the_rest(reader: JournalReader) -> None:
    """Read the records that a replay left unread because the core broke: they may be damaged,
    too."""
    for _ in reader:
        pass


def describe_step(run: Replay) -> Iterator[str]:
    """The last step's work, and the state of the queue."""
    plan = run.last_plan
    scheduler = run.engine.scheduler
    if plan is None:
        yield "no step was launched"
        return
    mode = plan.mode.name.lower()
    if plan.layers is not None:
        span = plan.layers
        mode += f" (layers {span.first} to {span.last} of {span.num_layers})"
    yield f"step {plan.step}: {mode}; requests: {len(plan.rows)}, tokens: {plan.num_tokens}"
    rows = plan.rows.tolist()
    starts = plan.starts.tolist()
    lens = plan.lens.tolist()
    for row, start, length in zip(rows, starts, lens, strict=True):
        request = scheduler.kv.columns.requests[row]
        name = request.message.rid if request else "ended"
        yield f"  {name:<24} tokens {start} to {start + length}"
    status = insight.get_queue_status(scheduler)
    num_running = status.prefilling + status.running_batch_size
    yield (
        f"then {status.waiting_queue_size} wait, {num_running} run, "
        f"{status.free_tokens:,} tokens of KV memory are available"
    )
    if scheduler.waiting_queue:
        first = next(iter(insight.list_waiting(scheduler, run.last_s)))
        explained = insight.explain(scheduler, first.id, run.last_s)
        if explained is not None:
            yield f"next in the queue: {first.message.rid}; {explained.timeline[-1].what}"


def describe_shadow(run: Replay) -> Iterator[str]:
    """What the shadow policy would have changed: in total, and for the requests with the largest
    changes."""
    scheduler = run.engine.scheduler
    policy = scheduler.waiting_queue.online.policy
    if not isinstance(policy, Shadowed):
        yield "the shadow policy was switched off in the journal"
        return
    notes = policy.notes()
    stats = scheduler.stats()
    yield (
        f"{policy.name} would have made {stats.total_shadow_later:,} of "
        f"{stats.total_shadow_admissions:,} admissions later; earlier, it would have admitted "
        f"{stats.total_shadow_earlier:,}"
    )
    ranked = sorted(notes.items(), key=lambda one: (-one[1].earlier_s, -one[1].num_before))
    for id, _ in ranked[:MAX_SHADOWED]:
        yield f"  {scheduler.history.name(id):<24} {insight.shadow_words(scheduler, id)}"
    if len(ranked) > MAX_SHADOWED:
        yield f"  and {len(ranked) - MAX_SHADOWED:,} others (--rid NAME)"


def describe_requests(run: Replay, rid: str) -> Iterator[str]:
    """The history of the requests with this name."""
    found = insight.trace_request_flow(run.engine.scheduler, rid, run.last_s)
    if not found:
        yield f"no request named {rid!r} is open or among the last that ended"
    for one in found:
        yield from describe_request(one)


def describe_why(run: Replay, rid: str) -> Iterator[str]:
    """Why the requests with this name were slow, as `weft ctl why` tells it, with token ids."""
    found = insight.trace_request_flow(run.engine.scheduler, rid, run.last_s)
    if not found:
        yield f"no request named {rid!r} is open or among the last that ended"
    yield from causes({"requests": msgspec.to_builtins(found)})


def describe_request(one: Explanation) -> Iterator[str]:
    stages = one.stages
    spans = (
        ("queued", stages.queued_s),
        ("prefill", stages.prefill_s),
        ("decode", stages.decode_s),
    )
    times = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in spans if seconds is not None)
    state = one.state
    if one.position is not None:
        state += f", {one.position} before it"
    yield f"{one.rid} (request {one.id}): {state}"
    yield (
        f"  {counted(one.prompt_tokens, 'prompt token')}, {one.cached_tokens:,} of them cached; "
        f"{counted(one.output_tokens, 'output token')}; {times}, total {stages.total_s:.3f} s"
    )
    if one.retractions:
        yield (
            f"  retractions: {one.retractions}; after them {one.recomputed_tokens:,} tokens were "
            f"computed again, {one.refound_tokens:,} were still cached"
        )
    if one.cache_cause is not None:
        yield f"  cache: {one.cache_cause.cause}: {one.cache_cause.words}"
    yield f"  drafts: {one.drafts}"
    if one.shadow:
        yield f"  shadow: {one.shadow}"
    for entry in one.timeline:
        yield f"  {entry}"


def _beginning(run: Replay, offset: int) -> str:
    began = run.began
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began.unix_s))
    version = began.weft
    if version != __version__:
        version += f" (this is {__version__})"
    tokens = began.settings.num_pages * began.settings.page_size
    policy = began.settings.schedule_policy
    text = f"recorded {when} by weft {version}: {tokens:,} KV tokens, policy {policy}"
    if began.state:
        num_open = len(run.engine.scheduler.requests)
        position = f" (byte {offset:,})" if offset > len(MAGIC) else ""
        requests = counted(num_open, "open request")
        text += f"; it continues at step {run.first_step:,}{position} with {requests}"
    return text


def _last_line(run: Replay, reader: JournalReader, took_s: float) -> str:
    served_s = 0.0
    if run.first_s is not None:
        served_s = run.last_s - run.first_s
    work = f"{counted(run.num_steps, 'step')} and {counted(run.num_requests, 'request')}"
    amount = f"{work}, {served_s:,.1f} s in {took_s:,.2f} s"
    if run.difference is not None:
        return f"{amount}: the first difference is at {run.difference}"
    if reader.damage is not None:
        return (
            f"{amount}: the journal is damaged at {reader.damage}; up to there the decisions are "
            "as recorded"
        )
    text = f"{amount}: every decision is as recorded"
    if run.broke is not None:
        text += f"; then, as recorded: {run.broke}"
    if reader.num_torn_bytes:
        text += (
            "; the last record was not finished, it has only "
            f"{counted(reader.num_torn_bytes, 'byte')}"
        )
    return text
