"""A world whose clients read slowly, or stop."""

from __future__ import annotations

import random
from collections import Counter

import msgspec

from tests.scheduler.random_worlds import random_prompt, random_settings
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.world import VOCAB
from weft.messages.codec import ToEngine
from weft.messages.control import (
    AbortRequest,
    BlockInput,
    ContinueGeneration,
    FlushCache,
    GetState,
    HealthCheck,
    ListRequests,
    PauseGeneration,
    UnblockInput,
)
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.status import UnreadableMessages


class FlowWorld(RecordedWorld):
    """Requests that come together travel together."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"flow {seed}")
        fails = {rng.randrange(5, 100)} if rng.random() < 0.1 else set()
        super().__init__(random_settings(rng), rng.choice([0, 1, 2]), fails)
        self.done = Counter[str]()
        self._together: list[GenerateRequest] = []

    def take_in(self, request: GenerateRequest) -> None:
        self._together.append(request)

    def let_go(self) -> None:
        """Send what has been collected."""
        members, self._together = self._together, []
        if len(members) == 1:
            self.tell(members[0])
        elif members:
            self.done["batch"] += 1
            prompts = list({member.input_ids: None for member in members})
            without = [
                msgspec.structs.replace(member, input_ids=b"", group="g") for member in members
            ]
            places = [prompts.index(member.input_ids) for member in members]
            self.tell(BatchGenerate(prompts=prompts, requests=without, prompt_of=places))

    def control(self) -> None:
        """One random control message, or none."""
        rng = self.rng
        some = self.rng.randrange(max(len(self.sent), 1))
        mode = rng.choice(["retract", "retract", "in_place", "in_place", "abort"])
        messages: list[tuple[float, ToEngine]] = [
            (0.05, BlockInput(call=1)),
            (0.10, UnblockInput(call=2)),
            (0.04, PauseGeneration(call=3, mode=mode)),  # type: ignore[arg-type]
            (0.15, ContinueGeneration(call=4)),
            (0.10, HealthCheck(call=5)),
            (0.02, Abort(ids=(some,))),
            (0.02, Abort(names=(f"r{some}",))),
            (0.004, Abort(names=("g",))),
            (0.02, FlushCache(call=6, timeout_s=3.0)),
            (0.02, rng.choice([FlushCache(call=7), ListRequests(call=7), AbortRequest("r1")])),
            (0.02, GetState(call=8)),
            (0.02, UnreadableMessages(num=2)),
        ]
        for share, message in messages:
            if rng.random() < share:
                self.done[type(message).__name__] += 1
                self.tell(message)
                if isinstance(message, HealthCheck):
                    self.step()

    def drive(self, num_requests: int) -> None:
        rng = self.rng
        families = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
        while len(self.sent) < num_requests:
            for _ in range(rng.choice([0, 0, 1, 2, 5])):
                prompt = random_prompt(
                    rng, families, self.scheduler.limits.max_len * rng.choice([1, 2, 4]) // 4
                )
                max_new = max(
                    1,
                    min(rng.choice([1, 2, 8, 20, 30]), self.scheduler.limits.max_len - len(prompt)),
                )
                user = rng.choice("aabc")
                priority = rng.choice([0, 0, 1, 20])
                timeout_ms = rng.choice([0, 0, 0, 0, 0, 9_000, 40_000])
                self.send(
                    prompt,
                    max_new_tokens=max_new,
                    user=user,
                    priority=priority,
                    timeout_ms=timeout_ms,
                )
            self.let_go()
            self.control()
            self.step()
        self.tell(ContinueGeneration(call=9))
        self.tell(BlockInput(call=10))
        self.tell(UnblockInput(call=11))
        while self.has_work:
            self.step()
            assert self.num_steps < 400 * num_requests, "no end in sight"
        self.step()
        self.check_idle()
        self.check_outputs()
