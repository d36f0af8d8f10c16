"""A shadow policy changes nothing, and says truly what it would have changed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.engine_world import EngineWorld
from tests.scheduler.own_policies import FAULTY
from tests.scheduler.policy_twins import order
from tests.scheduler.random_worlds import COMPOSED, drive, random_settings
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import Patience, settings
from tests.scheduler.world import World
from tests.seeds import seeds
from weft.cli.main import main
from weft.config.engine import EngineConfig
from weft.config.options import SettingsError, options_of
from weft.engine.explain import explain, get_queue_status, list_requests
from weft.journal.replay import Replay
from weft.messages.control import SetInternalState, SetPolicy
from weft.scheduler import policies
from weft.scheduler.policies.composed.shadowed import Shadowed

OWN = "tests.scheduler.own_policies:"


def changed(world: World) -> tuple[int, int, int]:
    stats = world.scheduler.stats()
    return stats.total_shadow_admissions, stats.total_shadow_later, stats.total_shadow_earlier


def three_prompts(shadow: str, **changes: object) -> tuple[World, list[int]]:
    """One request runs on the only row; three others wait, the shortest last."""
    world = World(
        settings(
            schedule_policy="fcfs",
            shadow_policy=shadow,
            max_running_requests=1,
            prefix_cache=False,
            aging_s=0.0,
            **changes,
        )
    )
    world.send([1], max_new_tokens=3, ignore_eos=True)
    world.step()
    return world, [world.send([2] * n, max_new_tokens=1) for n in (30, 20, 10)]


def test_a_shadow_counts_requests_it_would_have_admitted_earlier_or_later() -> None:
    world, (long, middle, short) = three_prompts("shortest-prefill-first")
    world.run_dry()
    world.check_outputs()
    policy = world.scheduler.waiting_queue.online.policy
    assert isinstance(policy, Shadowed)
    notes = policy.notes()
    assert notes[long].num_before == 2
    assert notes[middle].num_before == 1
    assert notes[middle].num_preferred == 0
    assert notes[short].num_before == 0
    assert notes[short].num_preferred == 2
    assert notes[short].earlier_s > 0
    # The first request of all was admitted before there was a choice.
    assert changed(world) == (4, 2, 1)
    told = explain(world.scheduler, short, world.time)
    assert told is not None
    assert "shortest-prefill-first would have admitted it in 2 passes" in told.shadow
    told = explain(world.scheduler, long, world.time)
    assert told is not None
    assert told.shadow.endswith("2 before it")


def test_a_shadow_with_the_same_policy_would_change_nothing() -> None:
    for policy in ("fcfs", "fair", "lpm", "priority > fair(key) > lof"):
        world = World(settings(schedule_policy=policy, shadow_policy=policy, num_pages=300))
        rng = random.Random(2)
        for number in range(80):
            prompt = [rng.randrange(100) for _ in range(rng.randrange(2, 40))]
            world.send(
                prompt, max_new_tokens=5, tenant=rng.choice("abc"), priority=rng.randrange(2)
            )
            if number % 3:
                world.step()
        world.run_dry(check=False)
        num_admitted, num_later, num_earlier = changed(world)
        assert num_admitted == 80
        assert num_later == 0
        assert num_earlier == 0


@pytest.mark.parametrize("seed", seeds(4, 8))
def test_no_decision_depends_on_a_shadow(seed: int) -> None:
    """A journal without a shadow is replayed bit for bit beside any."""
    rng = random.Random(seed)
    known = [*policies.names(), *COMPOSED]
    world = RecordedWorld(random_settings(rng), rng.choice([0, 1]))
    if seed % 2:
        live = random.Random(f"live {seed}").choice(known)
        world.tell(SetPolicy(call=0, policy=live))
    drive(world, rng, 20)
    for shadow in random.Random(f"shadow {seed}").sample(known, 2):
        replay = Replay(world.records, check=True, shadow=shadow)
        assert replay.run(), (shadow, replay.difference)


def test_a_shadow_that_begins_in_the_midst_of_work_hears_of_what_waits() -> None:
    for live, shadow in [("fair", "fcfs"), ("fcfs", "fair"), ("fair(key) > lof", "fair")]:
        world = RecordedWorld(settings(schedule_policy=live, max_running_requests=2, num_pages=80))
        world.put_aside_in_every_step()
        for number in range(6):
            world.send([number, 1], max_new_tokens=3, tenant="ab"[number % 2])
        world.run_dry()
        for records in world.records.files:
            replay = Replay(records, check=True, shadow=shadow)
            assert replay.run(), replay.difference


def test_a_shadow_is_set_changed_and_taken_away_while_requests_wait() -> None:
    world = EngineWorld(settings(schedule_policy="fair", max_running_requests=1))
    for number in range(8):
        world.send([number, 2], max_new_tokens=2, tenant="ab"[number % 2])
    world.step()
    before = order(world)
    for shadow in ("lpm", "fair(key) > lof", "dfs-weight", ""):
        done: Any = world.tell(SetInternalState(call=1, server_args={"shadow_policy": shadow}))
        assert done.success, done.message
        assert order(world) == before
        status = get_queue_status(world.scheduler)
        assert status.policy == "fair"
        assert status.shadow_policy == shadow
        row = list_requests(world.scheduler, world.time, 1)[0]
        assert row.shadow.startswith(shadow)
    wrong: Any = world.tell(SetInternalState(call=2, server_args={"shadow_policy": "magic"}))
    assert "'magic'; there is no such policy" in wrong.message
    (option,) = [one for one in options_of(EngineConfig) if one.name == "shadow_policy"]
    with pytest.raises(SettingsError, match="'magic'; there is no such policy"):
        option.checked("magic", "--shadow-policy")
    world.run_dry()
    world.check_idle()


def test_a_shadow_ages_as_the_policy_itself_would() -> None:
    world = World(
        settings(schedule_policy="lof", shadow_policy="lof", aging_s=3.0, max_running_requests=1)
    )
    for number in range(24):
        world.send([number, 3], max_new_tokens=1 + number % 6, ignore_eos=True)
    world.run_dry(check=False)
    assert changed(world) == (24, 0, 0)


def test_requests_that_are_not_ready_are_preferred_by_no_shadow() -> None:
    patience = Patience()
    world = World(
        settings(schedule_policy="fcfs", shadow_policy="lof", max_running_requests=1),
        features=(patience,),
    )
    for num_new in (2, 9, 2):  # the second is the longest, and waits for itself
        world.send([num_new, 3], max_new_tokens=num_new, ignore_eos=True)
    while len(world.finished) < 2:
        world.step(check=False)
    # When the first was admitted, nobody had asked whether the second is ready.
    assert changed(world) == (2, 1, 1)
    patience.is_over = True
    world.run_dry(check=False)


def test_requests_that_resume_are_no_admissions_that_a_shadow_could_change() -> None:
    world = World(settings(shadow_policy="lof", num_pages=400))
    ids = [world.send([number] * 5, max_new_tokens=9, ignore_eos=True) for number in range(4)]
    while not all(world.outputs[id] for id in ids):
        world.step()
    world.scheduler.retract(world.request(ids[1]))
    world.run_dry()
    assert world.finished[ids[1]].retractions == 1
    assert changed(world)[0] == 4


def test_what_a_shadow_would_have_changed_is_kept_when_another_policy_decides() -> None:
    world = World(settings(shadow_policy="lof", max_running_requests=1))
    ids = [world.send([number, 2], max_new_tokens=2 + number) for number in range(4)]
    for _ in range(4):
        world.step()
    before = shadow_of(world).notes()
    assert ids[-1] in before
    world.scheduler.set_policy("hrrn")
    assert shadow_of(world).notes() == before
    world.run_dry()
    world.check_idle()


def shadow_of(world: World) -> Shadowed:
    policy = world.scheduler.waiting_queue.online.policy
    assert isinstance(policy, Shadowed)
    return policy


@pytest.mark.parametrize("faulty", FAULTY)
def test_a_faulty_shadow_changes_nothing_and_is_reported_once(faulty: str) -> None:
    world = EngineWorld(
        settings(shadow_policy=f"{OWN}{faulty}", max_running_requests=2, max_queued_requests=9)
    )
    reported: list[Exception] = []
    world.engine.services.core.guard._report = reported.append
    ids = [world.send([number, 2], max_new_tokens=3) for number in range(9)]
    while world.has_work:
        world.step(check=False)
    assert [world.finished[id].status for id in ids] == [200] * 9
    outbox = world.scheduler.outbox
    assert not outbox.policy_fault
    # One that never joins, or is asked for no class, has no occasion to fail.
    assert len(reported) == bool(outbox.shadow_fault) <= 1


def test_the_command_line_replays_a_journal_beside_a_shadow(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    few = settings(max_running_requests=1, prefix_cache=False, aging_s=0.0)
    world = RecordedWorld(few)
    for length in (5, 40, 20, 6):
        world.send([2] * length, max_new_tokens=2)
    world.run_dry()
    file = tmp_path / "a.journal"
    world.write(file)
    assert main(["replay", str(file), "--shadow", "shortest-prefill-first"]) == 0
    text = capsys.readouterr().out
    assert "shortest-prefill-first would have made 2 of 4 admissions later" in text
    assert "would have admitted it in 2 passes in which it waited" in text
    assert "every decision is as recorded" in text
