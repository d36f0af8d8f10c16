"""What the engine tells of its queue, against what was sent and what became of it."""

from __future__ import annotations

import random

import pytest

from tests.engine.engine_world import EngineWorld
from tests.scheduler.scenes import settings
from tests.scheduler.world import World
from weft.engine.explain import get_queue_status
from weft.messages.control import BlockInput, QueueStatus, UnblockInput
from weft.messages.requests import Abort
from weft.scheduler.request import NO_ROW, RequestState


class Watched(EngineWorld):
    """Blocks, lets in, sends and aborts at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"status {seed}")
        limits = {"max_queued_requests": 9, "max_queued_tokens": 200, "chunked_prefill_size": 8}
        super().__init__(
            settings(max_running_requests=3, num_pages=120, context_length=100, **limits),
            depth=seed % 2,
        )
        self.came_blocked: set[int] = set()
        self.num_held = 0

    @property
    def is_blocked(self) -> bool:
        return self.engine.services.flow.input_gate.state == "blocked"

    def act(self) -> None:
        rng = self.rng
        for _ in range(rng.choice([0, 0, 1, 3])):
            id = self.send(
                [rng.randrange(300)] * rng.randrange(1, 30), max_new_tokens=rng.randrange(1, 12)
            )
            if self.is_blocked:
                self.came_blocked.add(id)
        if rng.random() < 0.1:
            self.tell(UnblockInput(call=2) if self.is_blocked else BlockInput(call=1))
        if rng.random() < 0.1 and self.sent:
            self.abort(Abort(ids=(rng.randrange(len(self.sent)),)))

    def compare(self, status: QueueStatus) -> None:
        requests = [one for one in self.scheduler.requests.values() if one.id >= 0]
        waiting = [one for one in requests if one.row == NO_ROW]
        held = [one for one in waiting if self.is_blocked and one.id in self.came_blocked]
        self.num_held += len(held)
        assert status.waiting_queue_size == len(waiting)
        assert status.held_requests == len(held)
        assert [one for one in waiting if self.scheduler.waiting_queue.is_blocked(one)] == held
        assert status.queued_tokens == sum(
            one.spec.prompt_len for one in waiting if not one.retractions
        )
        assert status.running_batch_size == sum(
            one.state is RequestState.DECODING for one in requests
        )
        assert status.prefilling == sum(one.state is RequestState.PREFILLING for one in requests)
        unfinished = [
            one.message.rid for one in requests if one.row != NO_ROW and one.kv_len < one.fill_len
        ]
        assert status.chunked_rid == (unfinished[0] if unfinished else None)
        assert status.max_running_requests == 3
        assert status.max_queued_requests == 9
        assert status.max_queued_tokens == 200
        if not requests:
            assert status.free_tokens == 120
            assert not status.batch_is_full


@pytest.mark.parametrize("seed", range(6))
def test_the_status_of_the_queue_counts_what_is_there(seed: int) -> None:
    world = Watched(seed)
    for _ in range(150):
        world.act()
        world.step()
        if not world.is_blocked:
            world.came_blocked.clear()
        world.compare(get_queue_status(world.scheduler))
    assert world.num_held > 20
    if world.is_blocked:
        world.tell(UnblockInput(call=3))
    world.run_dry()
    world.step()
    world.compare(get_queue_status(world.scheduler))
    world.check_outputs()


def test_tokens_that_were_evicted_are_counted_as_tokens() -> None:
    world = World(settings(page_size=4, num_pages=8, context_length=32))
    world.send(list(range(16)), max_new_tokens=1, ignore_eos=True)
    world.run_dry()
    assert world.scheduler.stats().total_evicted_tokens == 0
    world.send(list(range(100, 128)), max_new_tokens=1, ignore_eos=True)
    world.run_dry()  # 7 pages of 8, of which 4 were cached
    assert world.scheduler.stats().total_evicted_tokens == 3 * 4
