"""Random arrivals, aborts, failures and tiny memories, with every invariant of the design checked after every step."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.talk import Talk, with_sessions
from tests.scheduler.world import EOS, VOCAB
from weft.launch.cli import main
from weft.memory.accounting.audit import BrokenBooks
from weft.memory.allocator import OutOfPages, PageAllocator
from weft.messages.control import SetPolicy
from weft.messages.requests import Abort
from weft.scheduler.policy import POLICIES
from weft.scheduler.service.replay import Replay
from weft.scheduler.settings import SchedulerSettings


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
        policy=rng.choice(list(POLICIES)),
        aging_s=rng.choice([0.0, 5.0, 50.0]),
        low_priority_first=rng.random() < 0.2,
        preemption_threshold=rng.choice([0, 1, 10]),
        tenant_weights=(("a", 2.0), ("b", 0.5)),
        max_step_s=rng.choice([0.0, 0.0, 0.01, 0.05]),
        max_prefill_tokens=rng.choice([page_size, 20, 64, 1000]) if chunk is None else max(chunk, 64),
        chunked_prefill_size=chunk,
        mixed_chunk=rng.random() < 0.5,
        max_queued_requests=rng.choice([5, 1000, 1000, 1000]),
        max_queue_s=rng.choice([0.0, 0.0, 0.0, 40.0]),
        max_run_s=rng.choice([0.0, 0.0, 0.0, 30.0]),
        schedule_conservativeness=rng.choice([0.0, 0.0, 0.3, 1.0]),
    )


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


def run_random(seed: int, num_requests: int = 40, *, switches: bool = False) -> RecordedWorld:
    """Run a random world to its end. If it breaks, its journal is in the file that the exception names. `switches`: the
    policy changes again and again. In every third world some requests belong to sessions."""
    rng = random.Random(seed)
    settings = random_settings(rng)
    talks = random.Random(f"sessions of {seed}") if seed % 3 == 0 else None
    if talks is not None:
        settings = with_sessions(settings, talks)
    fails = {rng.randrange(5, 200) for _ in range(3)} if rng.random() < 0.2 else set()
    world = RecordedWorld(settings, depth=rng.choice([0, 1, 2]), fail_steps=fails)
    try:
        drive(world, rng, num_requests, switches, talks)
    except Exception as exc:
        path = world.write_failure(exc, f"weft-world-{seed}-")
        exc.add_note(f"its journal: weft replay {path} --check")
        raise
    return world


def drive(
    world: RecordedWorld,
    rng: random.Random,
    num_requests: int,
    switches: bool = False,
    talks: random.Random | None = None,
) -> None:
    """Send random requests and aborts, and look that all ends well."""
    talk = None if talks is None else Talk(world, talks)
    families = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
    crowd = rng.choice([2, 10, 40])  # as long as fewer wait, others come
    if world.settings.max_step_s:
        world.let_steps_cost(lambda plan: 0.001 + 0.0005 * plan.num_tokens)
    wishes = random.Random(f"wishes beside {families[0]}")
    sent = 0
    while sent < num_requests or world.has_work:
        if sent < num_requests and len(world.scheduler.waiting_queue) < crowd and rng.random() < 0.4:
            for _ in range(rng.choice([1, 1, 2, 8])):
                longest = world.scheduler.max_len * rng.choice([1, 1, 2, 4]) // 4
                prompt = random_prompt(rng, families, longest)
                max_new = rng.choice([None, 1, 2, 8, 20, 30, 40])
                if max_new is not None and rng.random() < 0.95:
                    max_new = max(1, min(max_new, world.scheduler.max_len - len(prompt)))
                world.send(
                    prompt,
                    **prompt_wishes(wishes, len(prompt)),
                    max_new_tokens=max_new if wishes.random() < 0.95 else 0,
                    ignore_eos=rng.random() < 0.2,
                    stop_token_ids=(7,) if rng.random() < 0.2 else (),
                    salt=rng.choice(["", "", "", "other"]),
                    user=rng.choice("aabc"),
                    priority=rng.choice([0, 0, 0, 1, 2, 20]),
                    timeout_ms=rng.choice([0, 0, 0, 0, 0, 0, 0, 5_000, 20_000, 60_000]),
                )
                sent += 1
        if talk is not None and sent < num_requests:
            talk.act()
        if rng.random() < 0.02 and world.sent:
            world.abort(Abort(ids=(rng.randrange(len(world.sent)),)))
        if rng.random() < 0.001:
            world.abort(Abort(all=True))
        if switches and rng.random() < 0.1:
            world.tell(SetPolicy(call=0, policy=rng.choice(list(POLICIES))))
        world.step()
        assert world.num_steps < 500 * num_requests, "no end in sight"
    world.run_dry()
    if talk is not None:
        talk.end()
        world.talked = talk.count
    world.step()
    world.check_idle()
    world.check_outputs()


@pytest.mark.parametrize("seed", range(120))
def test_random_schedule_keeps_every_invariant_and_is_replayed_bit_for_bit(seed: int) -> None:
    world = run_random(seed)
    if seed % 4 == 0:
        replay = Replay(world.records)
        assert replay.run(), replay.difference
        assert replay.engine.scheduler.stats() == world.scheduler.stats()


def test_a_broken_invariant_leaves_a_journal_that_breaks_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = PageAllocator.free
    with monkeypatch.context() as patch:
        patch.setattr(PageAllocator, "free", lambda self, pages: free(self, pages[pages % 16 != 5]))
        patch.setattr("weft.scheduler.service.books.Books.balance", lambda self: True)  # nobody mends it in time
        patch.setattr("weft.scheduler.service.books.Books.is_due", lambda self, now: False)
        with pytest.raises((BrokenBooks, OutOfPages)) as broken:
            run_random(8)
        (note,) = broken.value.__notes__
        assert note.startswith("its journal: weft replay ")
        path = note.split()[-2]
        assert main(["replay", path, "--check"]) == 0
        assert f"then, as recorded: {broken.type.__name__}: {broken.value}" in capsys.readouterr().out
    assert main(["replay", path]) == 1  # without the fault it decides otherwise
    assert "the first difference is at step" in capsys.readouterr().out
    Path(path).unlink()


def test_the_random_schedules_reach_what_they_are_meant_to() -> None:
    kinds = ["retractions", "evictions", "hits", "aborted", "refused", "failed", "late", "silent", "told in pieces"]
    reached = dict.fromkeys(kinds, 0)
    talked = Counter[str]()
    for seed in range(60):
        world = run_random(seed)
        stats = world.scheduler.stats()
        reached["retractions"] += stats.total_retractions
        reached["evictions"] += stats.total_evicted_tokens
        reached["hits"] += stats.total_cached_tokens
        reached["aborted"] += stats.total_aborted
        reached["refused"] += sum(finish.status in (400, 503) for finish in world.finished.values())
        reached["late"] += sum(finish.reason == "abort" and finish.status >= 400 for finish in world.finished.values())
        reached["failed"] += len(world.failures)
        silent = [id for id, one in world.sent.items() if one.sampling.max_new_tokens == 0]
        reached["silent"] += sum(world.finished[id].reason == "length" for id in silent)
        reached["told in pieces"] += sum(len(pieces) > 1 for pieces in world.given.values())
        talked += world.talked
    assert min(reached.values()) > 20, reached
    for what in ("opened", "closed", "expired", "appended", "branched", "stopped", "refused", "dropped"):
        assert talked[what] > 5, talked
