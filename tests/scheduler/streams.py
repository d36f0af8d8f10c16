"""A world in which steps take time, and the longest pause of each stream is known."""

from __future__ import annotations

from tests.scheduler.scenes import settings
from tests.scheduler.world import World
from weft.messages.replies import StepOutput
from weft.plan.step import Plan
from weft.scheduler.feature import Feature
from weft.scheduler.pace.step_cost import StepLoad

A, B, C = 0.002, 0.0004, 1e-6  # seconds for a step, a token, a pair


def seconds(plan: Plan) -> float:
    load = StepLoad.of(plan)
    return A + B * load.tokens + C * load.pairs


class Streams(World):
    """Remembers the longest time between two tokens of each request, from its second on."""

    def __init__(
        self, depth: int = 0, features: tuple[Feature, ...] = (), **changes: object
    ) -> None:
        super().__init__(
            settings(
                **{
                    "num_pages": 4_000,
                    "context_length": 2_000,
                    "max_running_requests": 24,
                    **changes,
                }
            ),
            depth,
            features=features,
        )
        self.let_steps_cost(seconds)
        self.last: dict[int, float] = {}
        self.longest: dict[int, float] = {}

    def receive(self, output: StepOutput) -> None:
        before = {id: len(tokens) for id, tokens in self.outputs.items()}
        super().receive(output)
        for id, tokens in self.outputs.items():
            if len(tokens) > before[id]:
                if id in self.last:
                    self.longest[id] = max(self.longest.get(id, 0.0), self.time - self.last[id])
                self.last[id] = self.time

    def step(self, check: bool = False) -> None:
        self.num_steps += 1
        for output in self.turn():
            self.receive(output)

    def step_len(self) -> int:
        """Tokens of the next step."""
        self.step()
        assert self.scheduler.last_batch is not None
        return self.scheduler.last_batch.plan.num_tokens

    def learn(self) -> None:
        """Let it see some steps, as a server does in its first seconds."""
        for length in (30, 200, 400, 100):
            self.send([length] * length, max_new_tokens=6, ignore_eos=True)
            self.run_dry(check=False)
        self.longest.clear()
        self.last.clear()
