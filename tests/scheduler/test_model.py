"""Every decision of the scheduler in random worlds, against a model that works it out a second
time."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.scheduler.model import Model, Moody
from tests.scheduler.random_worlds import drive, random_settings
from tests.scheduler.world import EOS, VOCAB, World
from tests.seeds import chosen, seeds
from weft.messages.control import SetPolicy
from weft.scheduler import policies
from weft.scheduler.features.prompt_logprobs import PromptLogprobsFeature
from weft.scheduler.settings import SchedulerSettings

SMALL = (0, 3, 4, 5, 6, 7, 8)


class Switched(World):
    """Its policy can be changed."""

    def tell(self, message: SetPolicy) -> None:
        self.scheduler.set_policy(message.policy)


def tiny_settings(rng: random.Random) -> SchedulerSettings:
    """So little of everything that each limit is reached to the token, again and again."""
    page_size = rng.choice([1, 1, 2, 3])
    chunk = rng.choice([None, page_size, page_size + 1, 5, 8])
    return SchedulerSettings(
        num_pages=rng.choice([16, 24, 40]) // page_size,
        page_size=page_size,
        max_running_requests=rng.choice([2, 3, 5]),
        context_length=rng.choice([16, 24, 40]),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        prefix_cache=rng.random() < 0.8,
        schedule_policy=rng.choice(["priority", "priority", *policies.names()]),
        aging_s=rng.choice([0.0, 8.0]),
        low_priority_first=rng.random() < 0.3,
        preemption_threshold=rng.choice([0, 1]),
        max_prefill_tokens=rng.choice([4, 7, 12, 1000])
        if chunk is None
        else max(chunk, rng.choice([1, 9])),
        chunked_prefill_size=chunk or -1,
        mixed_chunk=rng.random() < 0.6,
        schedule_conservativeness=rng.choice([0.0, 0.0, 0.3, 1.0, 2.0]),
    )


def crowded_settings(rng: random.Random) -> SchedulerSettings:
    """Many run, and memory is promised to nobody: it runs out, and places are taken."""
    page_size = rng.choice([1, 2, 4])
    return SchedulerSettings(
        num_pages=rng.choice([60, 90]) // page_size,
        page_size=page_size,
        max_running_requests=8,
        context_length=40,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        prefix_cache=rng.random() < 0.8,
        schedule_policy=rng.choice(["priority", "priority", "fcfs", "lpm"]),
        aging_s=rng.choice([0.0, 15.0]),
        low_priority_first=rng.random() < 0.3,
        preemption_threshold=rng.choice([0, 1]),
        chunked_prefill_size=rng.choice([-1, 4, 12, 16]),
        mixed_chunk=rng.random() < 0.7,
        schedule_conservativeness=rng.choice([0.0, 0.0, 0.1]),
    )


def run_beside_model(settings: SchedulerSettings, rng: random.Random, num_requests: int) -> Model:
    moody = Moody()
    features = PromptLogprobsFeature(), *([moody] if rng.random() < 0.3 else [])
    world = Switched(settings, depth=rng.choice([0, 1, 2]), features=features)
    moody.now = lambda: world.num_steps
    model = Model(world).follow()
    drive(world, rng, num_requests, switches=rng.random() < 0.2)
    model.check_counters()
    return model


@functools.cache
def run_small(seed: int) -> Counter[str]:
    """What a tiny world, or every second time a crowded one, has reached."""
    rng = random.Random(f"small {seed}")
    settings = tiny_settings(rng) if seed % 2 else crowded_settings(rng)
    return run_beside_model(settings, rng, 60).count


@pytest.mark.parametrize("seed", seeds(6, 20))
def test_every_pass_decides_as_the_model_says(seed: int) -> None:
    rng = random.Random(f"model {seed}")
    settings = replace(random_settings(rng), max_step_ms=0.0, max_slowdown=-1.0)
    assert run_beside_model(settings, rng, 40).count["passes"] > 20


@pytest.mark.parametrize("seed", chosen(SMALL, range(40)))
def test_at_the_limits_of_memory_every_pass_decides_as_the_model_says(seed: int) -> None:
    run_small(seed)


def test_the_small_worlds_reach_what_they_are_meant_to() -> None:
    reached = Counter[str]()
    for seed in SMALL:
        reached += run_small(seed)
    for what in (
        "passes",
        "full",
        "retracted",
        "preempted",
        "exact fits",
        "open prompts",
        "mixed",
        "switches",
    ):
        assert reached[what] > 8, reached


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", seeds(2, 8))
def test_what_is_not_finite_ends_its_request_and_never_stays_in_the_cache(
    seed: int, depth: int
) -> None:
    rng = random.Random(f"poison {seed}")
    settings = replace(random_settings(rng), prefix_cache=True, max_step_ms=0.0, max_slowdown=-1.0)
    world = World(settings, depth, features=(PromptLogprobsFeature(),))
    world.runner.poison = 20
    drive(world, rng, 40)
    assert any(
        finish.reason == "error" and finish.status == 500 for finish in world.finished.values()
    )


def test_decoding_rows_for_which_there_is_no_memory_do_not_keep_an_open_prompt_from_the_rest_of_it() -> (
    None
):
    """Three requests decode beside the chunks of a long prompt until less than a token for each is
    left."""
    reached = Counter[str]()
    for num_pages in range(77, 93):
        settings = SchedulerSettings(
            num_pages=num_pages,
            page_size=1,
            max_running_requests=4,
            context_length=75,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            prefix_cache=False,
            chunked_prefill_size=8,
            mixed_chunk=True,
            schedule_conservativeness=0.0,
            aging_s=0.0,
        )
        world = World(settings)
        model = Model(world).follow()
        for number in range(3):
            world.send([number] * 3, max_new_tokens=40)
            world.step()
            world.step()
        world.send([9] * 55, max_new_tokens=2)
        world.run_dry()
        model.check_counters()
        reached += model.count
    assert reached["no memory to mix"] > 3, reached
