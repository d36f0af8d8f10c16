"""Random arrivals, aborts, failures and tiny memories in a world that checks every invariant after
every step."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tests.scheduler.media_oracle import PLACEHOLDER
from tests.scheduler.oracle_runner import expected_output
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.talk import Talk, with_sessions
from tests.scheduler.world import EOS, VOCAB
from weft.config.media import MediaRules
from weft.messages.cache import ForgetPrefix
from weft.messages.control import FlushCache, SetPolicy
from weft.messages.media import MediaItem
from weft.messages.pins import Unpin
from weft.messages.requests import Abort
from weft.messages.weights import UpdateWeightsFromDisk
from weft.plan.step import Plan
from weft.scheduler import policies
from weft.scheduler.pace.step_cost import StepLoad
from weft.scheduler.request import adapter_and_salt
from weft.scheduler.settings import (
    LEAST_STATE_SLOTS,
    DraftSettings,
    SchedulerSettings,
    StateSettings,
    WindowSettings,
)

COMPOSED = (
    "priority > lpm",
    "priority > fair(key)",
    "priority > fair(key) > shortest-prefill-first",
    "fair(key) > dfs-weight",
    "fair(key) > hrrn",
    "lof > lpm > fcfs",
    "priority > lof > dfs-weight",
    "priority > fair(key) > lof > random",
)


def random_settings(rng: random.Random) -> SchedulerSettings:
    page_size = rng.choice([1, 1, 2, 3, 4, 8, 16])
    num_pages = rng.choice([60, 100, 200, 300, 500]) // page_size + rng.choice([3, 6])
    chunk = rng.choice([None, page_size, 2 * page_size, 16, 33])
    if chunk is not None:
        chunk = max(chunk, page_size)
    return SchedulerSettings(
        num_pages=num_pages,
        page_size=page_size,
        max_running_requests=rng.choice([1, 2, 6, 12, 24]),
        context_length=rng.choice([40, 90, 160]),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        prefix_cache=rng.random() < 0.8,
        schedule_policy=rng.choice(policies.names()),
        aging_s=rng.choice([0.0, 5.0, 50.0]),
        low_priority_first=rng.random() < 0.2,
        preemption_threshold=rng.choice([0, 1, 10]),
        tenant_weights="a=2,b=0.5",
        max_step_ms=rng.choice([0.0, 0.0, 10.0, 50.0]),
        max_prefill_tokens=rng.choice([page_size, 20, 64, 1000])
        if chunk is None
        else max(chunk, 64),
        chunked_prefill_size=chunk or -1,
        mixed_chunk=rng.random() < 0.5,
        max_queued_requests=rng.choice([5, 1000, 1000, 1000]),
        max_queue_s=rng.choice([0.0, 0.0, 0.0, 40.0]),
        max_run_s=rng.choice([0.0, 0.0, 0.0, 30.0]),
        schedule_conservativeness=rng.choice([0.0, 0.0, 0.3, 1.0]),
        max_slowdown=rng.choice([-1.0, 1.5, 2.5]),
        copies_pages=num_pages % 3 > 0,
    )


def with_windows(settings: SchedulerSettings, rng: random.Random) -> SchedulerSettings:
    """Layers with windows, or with chunks of the context, get pages of their own, from barely
    enough to more than there ever are."""
    window = rng.choice([1, 2, 5, 16, 33, 70, 200])
    none = WindowSettings(window=window, num_pages=0)
    least = none.least_pages(settings.page_size, settings.chunk_len or 0)
    more = rng.choice([0, 1, 5, 20, 60, 400]) // settings.page_size
    windows = WindowSettings(
        window=window, num_pages=least + more, chunked=settings.num_pages % 2 > 0
    )
    return replace(settings, windows=windows)


def with_states(settings: SchedulerSettings, rng: random.Random) -> SchedulerSettings:
    """Some layers keep a state, with barely enough slots to more than there are rows."""
    states = StateSettings(
        num_slots=LEAST_STATE_SLOTS + rng.choice([0, 1, 2, 5, 12, 40]),
        least_border=rng.choice([1, 2, 4, 8, 16, 64]),
        least_shared=rng.choice([1, 8, 24]),
    )
    return replace(settings, states=states)


def with_drafts(settings: SchedulerSettings, rng: random.Random) -> SchedulerSettings:
    sources = rng.choice(
        ["prediction", "tree", "prediction,ngram", "prediction,tree", "prediction,tree,ngram"]
    )
    return replace(settings, speculative=sources, max_draft=rng.choice([1, 2, 5, 8, 30]))


def with_draft_model(settings: SchedulerSettings, rng: random.Random) -> SchedulerSettings:
    """A second model guesses, alone or beside other sources; some know fewer tokens, or shorter
    texts."""
    draft = DraftSettings(
        vocab_size=rng.choice([VOCAB, VOCAB, VOCAB - 10]),
        context_length=rng.choice([settings.context_length, 1_000, 50]),
    )
    return replace(
        settings,
        speculative=rng.choice(["draft", "draft", "prediction,tree,draft,ngram"]),
        max_draft=rng.choice([1, 2, 4, 8, 20]),
        draft=draft,
    )


def with_pins(settings: SchedulerSettings, rng: random.Random) -> SchedulerSettings:
    """Some requests pin the beginning of their prompts, for much or little of the pool."""
    if rng.random() < 0.5:
        # A long request needs what is pinned.
        num_pages = settings.context_length // settings.page_size + 3
        settings = replace(settings, num_pages=min(settings.num_pages, num_pages))
    return replace(
        settings,
        prefix_cache=True,
        max_pinned=rng.choice([0.0, 0.1, 0.25, 0.5, 0.9]),
        tenant_cache=rng.choice(["", "a=0.5", "a=0.3,b=0.0"]),
    )


def random_pins(rng: random.Random, prompt_len: int) -> list[dict[str, object]]:
    """Up to four marks of a prompt, the shortest first."""
    if rng.random() < 0.4:
        return []
    lengths = sorted(rng.randrange(1, prompt_len + 3) for _ in range(rng.choice([1, 1, 2, 4])))
    ttls = sorted((rng.choice([2.0, 50.0, 1_000.0]) for _ in lengths), reverse=True)
    name = rng.choice(["", "", "", "x", "y"])
    marks: list[dict[str, object]] = []
    for length, ttl_s in zip(lengths, ttls, strict=True):
        marks.append({"length": length, "ttl_s": ttl_s})
    marks[-1]["name"] = name
    return marks


def forget_something(world: RecordedWorld, rng: random.Random) -> None:
    """The beginning of a request, or of one that has ended."""
    cached = world.engine.scheduler.kv.cache.tree.sequences()
    if cached:
        namespace, tokens = rng.choice(cached)
        adapter, cache_salt = adapter_and_salt(namespace)
        part = tokens[: rng.randrange(len(tokens)) + 1]
        keep = rng.choice([0, 0, rng.randrange(len(tokens))])
        world.tell(ForgetPrefix(tokens=part, cache_salt=cache_salt, adapter=adapter, keep=keep))


def disturb_pins(world: RecordedWorld, rng: random.Random) -> None:
    """What may happen to pins beside requests."""
    if rng.random() < 0.02:
        names = [*world.pins.feature.book.by_name, "x", "nobody"]
        world.tell(Unpin(name=rng.choice(names)))
    if rng.random() < 0.02:
        forget_something(world, rng)
    if rng.random() < 0.003:
        world.tell(FlushCache(timeout_s=rng.choice([0.0, 20.0])))
    if rng.random() < 0.002:
        world.tell(UpdateWeightsFromDisk(model_path="0"))  # the same: answers stay
    if rng.random() < 0.01:
        world.time += 5.0


def prediction(rng: random.Random, prompt: list[int]) -> list[int]:
    """What a client expects of a prompt: right, right with mistakes, or anything."""
    expected = expected_output(prompt, 40, VOCAB, {EOS})
    kind = rng.random()
    if kind < 0.3:
        return []
    if kind < 0.5:
        return [rng.randrange(VOCAB) for _ in range(40)]
    wrong = rng.choice([0.0, 0.02, 0.1, 0.3])
    return [rng.randrange(VOCAB) if rng.random() < wrong else token for token in expected]


def with_media(settings: SchedulerSettings, rng: random.Random) -> SchedulerSettings:
    """The model reads pictures, by one position a token or by three, or sees them both ways."""
    sees_both_ways = settings.states is None and rng.random() < 0.4
    longest = rng.choice([0, 24])
    if settings.windows is not None:
        longest = 0  # their pages are counted already
    rules = MediaRules(
        has_three_positions=rng.random() < 0.5,
        sees_both_ways=sees_both_ways,
        longest_unsplit=longest if sees_both_ways else 0,
    )
    return replace(
        settings,
        media=rules,
        max_encoder_tokens=rng.choice([0, 1, 10, 30]),
        encoder_cache_tokens=rng.choice([0, 10, 30, 1_000]),
    )


def picture(number: int, start: int) -> MediaItem:
    """One of a few, of up to 24 tokens."""
    grid = [(1, 2, 3), (1, 4, 4), (2, 2, 2), (1, 1, 1), (3, 2, 4), (1, 6, 2)][number % 6]
    return MediaItem(
        kind="video" if grid[0] > 1 else "image",
        digest=hashlib.sha256(b"picture %d" % number).digest(),
        start=start,
        length=math.prod(grid),
        grid=None if number % 4 == 3 else grid,
        time_step=1 + 0.75 * (number % 3),
        shape=(1,),
        values=bytes(4),
    )


def with_pictures(rng: random.Random, prompt: list[int]) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Some of the prompt's tokens stand for pictures, as a rule at the same places."""
    found: list[MediaItem] = []
    seen = list(prompt)
    end = 0
    for place in (3, 12, 16, 41):
        item = picture(rng.choice([place, place, place, rng.randrange(12)]), place)
        if place < end or place + item.length > len(prompt) or rng.random() < 0.2:
            continue
        seen[place : place + item.length] = [PLACEHOLDER] * item.length
        found.append(item)
        end = place + item.length
    return seen, tuple(found)


def with_layers(settings: SchedulerSettings, rng: random.Random) -> SchedulerSettings:
    """Prefills are split by layers, into many pieces or two."""
    num_layers = rng.choice([2, 3, 8, 28])
    return replace(
        settings, num_layers=num_layers, split_prefill_layers=rng.randrange(1, num_layers + 1)
    )


def timed_settings(rng: random.Random) -> SchedulerSettings:
    """Long prompts and large chunks: how far a prompt gets in a step is decided by time, by tokens
    or by memory."""
    page_size = rng.choice([1, 4, 16, 64])
    context_length = rng.choice([640, 1_500, 3_000])
    chunk = rng.choice([256, 512, 1_024, 2_048])
    num_tokens = int(context_length * rng.choice([1.05, 1.3, 4.0]))
    return SchedulerSettings(
        num_pages=num_tokens // page_size + 2,
        page_size=page_size,
        max_running_requests=rng.choice([3, 8, 24]),
        context_length=context_length,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        prefix_cache=rng.random() < 0.8,
        schedule_policy=rng.choice(policies.names()),
        aging_s=rng.choice([0.0, 0.5]),
        preemption_threshold=rng.choice([0, 1, 10]),
        max_step_ms=rng.choice([0.0, 10.0, 20.0, 40.0]),
        max_slowdown=rng.choice([-1.0, 1.5, 2.5]),
        max_prefill_tokens=rng.choice([128, chunk // 2, chunk, 4 * chunk]),
        chunked_prefill_size=chunk,
        mixed_chunk=rng.random() < 0.5,
        max_run_s=rng.choice([0.0, 0.0, 2.0]),
        schedule_conservativeness=rng.choice([0.0, 0.0, 0.3]),
        copies_pages=num_tokens % 3 > 0,
    )


@dataclass(frozen=True)
class StepSeconds:
    """What a step costs: so much by itself, for each token, and for each pair of a token and one
    that it sees."""

    step_s: float
    token_s: float
    pair_s: float

    @classmethod
    def drawn(cls, rng: random.Random, max_step_s: float) -> StepSeconds:
        """A step of 60 to 500 tokens takes as long as a step may, with or without what comes before
        them."""
        token_s = max_step_s / rng.choice([60, 200, 500])
        pair_s = rng.choice([0.0, 0.001, 0.01]) * token_s
        return cls(step_s=max_step_s * rng.choice([0.05, 0.3]), token_s=token_s, pair_s=pair_s)

    def __call__(self, plan: Plan) -> float:
        load = StepLoad.of(plan)
        return self.step_s + self.token_s * load.tokens + self.pair_s * load.pairs


def run_timed(
    seed: int,
    num_requests: int = 24,
    *,
    puts_aside: bool = False,
    splits: bool = False,
    media: bool = False,
) -> TimedWorld:
    """Run a random world in which time cuts prompts. If it breaks, its journal is in the file that
    the exception names. `puts_aside`, `splits` and `media` as for `run_random`."""
    rng = random.Random(f"time {seed}")
    settings = timed_settings(rng)
    if splits:
        settings = with_layers(settings, random.Random(f"layers of time {seed}"))
    if media:
        settings = with_media(settings, random.Random(f"media of time {seed}"))
    depth = rng.choice([0, 1, 2])
    world = TimedWorld(settings, depth, StepSeconds.drawn(rng, settings.max_step_s))
    if puts_aside:
        world.put_aside_often()
    with journal_of_failure(world, f"weft-time-{seed}-"):
        drive_timed(world, rng, num_requests)
    return world


def drive_timed(world: TimedWorld, rng: random.Random, num_requests: int) -> None:
    """Send long prompts while others stream, and look that all ends well."""
    families = [[rng.randrange(VOCAB) for _ in range(1_000)] for _ in range(2)]
    longest = world.scheduler.limits.max_len - 1
    crowd = rng.choice([3, 12])
    pictures = random.Random(f"pictures of {num_requests}")
    while len(world.sent) < num_requests or world.has_work:
        if (
            len(world.sent) < num_requests
            and len(world.scheduler.requests) < crowd
            and rng.random() < 0.3
        ):
            for _ in range(rng.choice([1, 2, 6])):
                head = rng.choice(families)[: rng.choice([0, 0, 100, 900])]
                tail = [rng.randrange(VOCAB) for _ in range(int(rng.lognormvariate(5, 1)))]
                prompt = [*head, rng.randrange(VOCAB), *tail][:longest]
                items: tuple[MediaItem, ...] = ()
                if world.settings.media is not None and pictures.random() < 0.5:
                    prompt, items = with_pictures(pictures, prompt)
                world.send(
                    prompt,
                    media=items,
                    max_new_tokens=max(
                        1, min(rng.choice([1, 8, 60]), world.scheduler.limits.max_len - len(prompt))
                    ),
                    ignore_eos=True,
                    salt=rng.choice(["", "", "", "other"]),
                    user=rng.choice("aabc"),
                    priority=rng.choice([0, 0, 1, 20]),
                )
        if rng.random() < 0.01 and world.sent:
            world.abort(Abort(ids=(rng.randrange(len(world.sent)),)))
        world.step()
        check_step(world)
        count_cuts(world)
        assert world.num_steps < 2_000 * num_requests, "no end in sight"
    world.step()
    world.check_idle()
    world.check_outputs()


def check_step(world: RecordedWorld) -> None:
    """A step with prompts keeps to the budgets of tokens, chunks included; a picture that is
    computed as a whole may be longer."""
    settings, batch = world.settings, world.scheduler.last_batch
    if settings.keeps_items_unsplit:
        return
    if batch is not None and batch.prefills and settings.chunk_len is not None:
        assert batch.plan.num_tokens <= settings.chunk_len
        assert batch.plan.num_tokens <= settings.max_prefill_tokens


def count_cuts(world: TimedWorld) -> None:
    """Count the steps in which a prompt was cut though its chunk and the step had room for another
    page."""
    settings, batch = world.settings, world.scheduler.last_batch
    if batch is None or batch.plan.step == world.last_step or settings.chunk_len is None:
        return
    world.last_step = batch.plan.step
    room = min(settings.chunk_len, settings.max_prefill_tokens) - batch.plan.num_tokens
    is_cut = any(not request.completes for request in batch.prefills)
    pages_left = world.scheduler.kv.room.available // settings.page_size
    world.num_cut_by_time += is_cut and room >= 2 * settings.page_size and pages_left > 2


class TimedWorld(RecordedWorld):
    """A clock that goes by what steps cost, so that their cost can be learnt whatever the
    overlap."""

    def __init__(self, settings: SchedulerSettings, depth: int, seconds: StepSeconds) -> None:
        super().__init__(settings, depth)
        self.tick_s = 0.0001
        self.let_steps_cost(seconds)
        self.last_step = -1
        self.num_cut_by_time = 0


@contextmanager
def journal_of_failure(world: RecordedWorld, prefix: str) -> Iterator[None]:
    """If the world breaks, its journal is kept, and the exception says where."""
    try:
        yield
    except Exception as exc:
        path = world.write_failure(exc, prefix)
        exc.add_note(f"its journal: weft replay {path} --check")
        raise


def random_prompt(rng: random.Random, families: list[list[int]], longest: int) -> list[int]:
    head = rng.choice(families)[: rng.randrange(0, 60)] if rng.random() < 0.7 else []
    tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
    return (head + tail)[:longest]


def prompt_wishes(rng: random.Random, prompt_len: int) -> dict[str, int]:
    """What some want to know of their prompt."""
    if rng.random() < 0.7:
        return {}
    start = rng.choice([0, 0, rng.randrange(prompt_len), prompt_len - 1])
    return {"prompt_logprobs": 0, "prompt_logprobs_start": start}


def run_random(
    seed: int,
    num_requests: int = 40,
    *,
    switches: bool = False,
    puts_aside: bool = False,
    windows: bool = False,
    states: bool = False,
    drafts: bool = False,
    guesses: bool = False,
    splits: bool = False,
    media: bool = False,
    composed: bool = False,
    pins: bool = False,
    num_stages: int = 1,
    background: bool = False,
    dear_tokens: bool = False,
) -> RecordedWorld:
    """Run a random world to its end. If it breaks, its journal is in the file that the exception
    names. `switches`: the policy changes again and again. In every third world some requests belong
    to sessions. `puts_aside`: a file of the journal has few steps. `windows`: some layers have
    windows, and pages of their own. `states`: some layers keep a state. `drafts`: tokens are
    guessed, rightly and wrongly. `guesses`: by a second model. `splits`: prefills are split by
    layers. `media`: prompts have pictures. `composed`: policies are made of several. `pins`: some
    requests pin the beginning of their prompts. `num_stages`: so many work at once on different
    rows. `background`: half of the requests are background requests. `dear_tokens`: each token
    takes half as long as a step without any, so that guesses have no time beside all rows."""
    rng = random.Random(seed)
    settings = random_settings(rng)
    if pins:
        settings = with_pins(settings, random.Random(f"pins of {seed}"))
    if windows:
        settings = with_windows(settings, random.Random(f"windows of {seed}"))
    if states:
        settings = with_states(settings, random.Random(f"states of {seed}"))
    if drafts:
        settings = with_drafts(settings, random.Random(f"drafts of {seed}"))
    if guesses:
        settings = with_draft_model(settings, random.Random(f"guesses of {seed}"))
    if splits:
        settings = with_layers(settings, random.Random(f"layers of {seed}"))
    if media:
        settings = with_media(settings, random.Random(f"media of {seed}"))
    if composed:
        settings = replace(settings, schedule_policy=COMPOSED[seed % len(COMPOSED)])
    talks = random.Random(f"sessions of {seed}") if seed % 3 == 0 else None
    if talks is not None:
        settings = with_sessions(settings, talks)
    fails = {rng.randrange(5, 200) for _ in range(3)} if rng.random() < 0.2 else set()
    depth = rng.choice([0, 1, 2])
    if drafts or guesses:
        depth = min(depth, 1)  # a run is known to the device until the next step alone
    has_groups = settings.windows is not None or settings.states is not None
    if settings.draft_sources and has_groups and not guesses and seed % 4:
        depth = 0  # there drafts follow a known token alone, and with overlap there is none
    if num_stages > 1:
        depth = num_stages - 1
        settings = replace(settings, num_stages=num_stages, max_stage_rows=3 * (seed % 2))
    world = RecordedWorld(settings, depth, fail_steps=fails)
    if puts_aside:
        world.put_aside_often()
    with journal_of_failure(world, f"weft-world-{seed}-"):
        drive(
            world,
            rng,
            num_requests,
            switches,
            talks,
            pins=pins,
            background=background,
            dear_tokens=dear_tokens,
        )
    return world


def drive(
    world: RecordedWorld,
    rng: random.Random,
    num_requests: int,
    switches: bool = False,
    talks: random.Random | None = None,
    *,
    pins: bool = False,
    background: bool = False,
    dear_tokens: bool = False,
) -> None:
    """Send random requests and aborts, and look that all ends well."""
    talk = None if talks is None else Talk(world, talks)
    families = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
    crowd = rng.choice([2, 10, 40])  # as long as fewer wait, others come
    if world.settings.draft_sources:
        token_s = 0.0005 if dear_tokens else 0.00001
        world.let_steps_cost(
            lambda plan: token_s * plan.num_tokens + (0.001 if plan.drafting is None else 0.0001)
        )
    elif world.settings.max_step_s:
        world.let_steps_cost(lambda plan: 0.001 + 0.0005 * plan.num_tokens)
    guesses = random.Random(f"guesses beside {families[0]}")
    wishes = random.Random(f"wishes beside {families[0]}")
    pictures = random.Random(f"pictures beside {families[0]}")
    marks = random.Random(f"pins beside {families[0]}")
    classes = random.Random(f"classes beside {families[0]}")
    sent = 0
    while sent < num_requests or world.has_work:
        if (
            sent < num_requests
            and len(world.scheduler.waiting_queue) < crowd
            and rng.random() < 0.4
        ):
            for _ in range(rng.choice([1, 1, 2, 8])):
                longest = world.scheduler.limits.max_len * rng.choice([1, 1, 2, 4]) // 4
                prompt = random_prompt(rng, families, longest)
                max_new = rng.choice([None, 1, 2, 8, 20, 30, 40])
                if max_new is not None and rng.random() < 0.95:
                    max_new = max(1, min(max_new, world.scheduler.limits.max_len - len(prompt)))
                media: tuple[MediaItem, ...] = ()
                if world.settings.media is not None and pictures.random() < 0.7:
                    prompt, media = with_pictures(pictures, prompt)
                world.send(
                    prompt,
                    media=media,
                    pins=random_pins(marks, len(prompt)) if pins else (),
                    **({} if media else prompt_wishes(wishes, len(prompt))),
                    max_new_tokens=max_new if wishes.random() < 0.95 else 0,
                    ignore_eos=rng.random() < 0.2,
                    stop_token_ids=(7,) if rng.random() < 0.2 else (),
                    salt=rng.choice(["", "", "", "other"]),
                    user=rng.choice("aabc"),
                    priority=rng.choice([0, 0, 0, 1, 2, 20]),
                    timeout_ms=rng.choice([0, 0, 0, 0, 0, 0, 0, 5_000, 20_000, 60_000]),
                    prediction=prediction(guesses, prompt) if world.settings.draft_sources else [],
                    background=background and classes.random() < 0.5,
                )
                sent += 1
        if talk is not None and sent < num_requests:
            talk.act()
        if rng.random() < 0.02 and world.sent:
            world.abort(Abort(ids=(rng.randrange(len(world.sent)),)))
        if rng.random() < 0.001:
            world.abort(Abort(all=True))
        if pins:
            disturb_pins(world, marks)
        if switches and rng.random() < 0.1:
            world.tell(SetPolicy(call=0, policy=rng.choice([*policies.names(), *COMPOSED])))
        world.step()
        check_step(world)
        assert world.num_steps < 500 * num_requests, "no end in sight"
    world.run_dry()
    if talk is not None:
        talk.end()
        world.talked = talk.count
    world.step()
    world.check_idle()
    world.check_outputs()
