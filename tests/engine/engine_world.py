"""A world whose requests go through a whole engine: messages in, replies out."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.scheduler.world import World
from weft.engine.engine import Engine
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.control import ListRequests, ListRequestsReply
from weft.messages.replies import StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.settings import SchedulerSettings


class EngineWorld(World):
    """A world whose requests go through a whole engine; `replies` has all that is no step's
    output."""

    def __init__(self, settings: SchedulerSettings, depth: int = 0, **options: Any) -> None:
        super().__init__(settings, depth, fail_steps=options.pop("fail_steps", None))
        self.engine = Engine(
            settings,
            self.runner,
            clock=lambda: self.time,
            overlap=depth,
            on_failure=self.failed,
            **options,
        )
        self.scheduler = self.engine.scheduler
        self.replies: list[FromEngine] = []

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def tell(self, message: ToEngine) -> FromEngine | None:
        return self.engine.submit(message)

    def take_in(self, request: GenerateRequest) -> None:
        assert self.tell(request) is None

    def expect(self, *requests: GenerateRequest) -> None:
        """These are going to be sent, in whatever way."""
        for one in requests:
            self.sent[one.id], self.outputs[one.id] = one, []
            self.prompts[one.id] = np.frombuffer(one.input_ids, dtype=np.int32).tolist()

    def abort(self, message: Abort) -> None:
        assert self.tell(message) is None

    def turn(self) -> list[StepOutput]:
        replies = self.engine.step()
        self.replies += [reply for reply in replies if not isinstance(reply, StepOutput)]
        return [reply for reply in replies if isinstance(reply, StepOutput)]

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def answers(self, kind: type[Any]) -> list[Any]:
        return [reply for reply in self.replies if isinstance(reply, kind)]

    def why(self) -> list[str]:
        reply = self.tell(ListRequests(call=1))
        assert isinstance(reply, ListRequestsReply)
        return [row.why for row in reply.requests]


def request(
    id: int, prompt: list[int], *, rid: str = "", group: str = "", **sampling: Any
) -> GenerateRequest:
    packed = np.array(prompt, dtype=np.int32).tobytes()
    params = SamplingParams(**sampling)
    return GenerateRequest(
        id=id, rid=rid or f"r{id}", group=group, input_ids=packed, sampling=params
    )
