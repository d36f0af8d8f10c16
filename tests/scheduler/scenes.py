"""A small scheduler whose scenes can be counted by hand."""

from __future__ import annotations

from tests.scheduler.oracle_runner import OracleStep
from tests.scheduler.world import EOS, VOCAB, World
from weft.plan.step import Plan
from weft.scheduler.feature import Admission, Feature
from weft.scheduler.request import Request
from weft.scheduler.settings import SchedulerSettings


def settings(**changes: object) -> SchedulerSettings:
    values = {
        "num_pages": 400,
        "page_size": 1,
        "max_running_requests": 4,
        "context_length": 200,
        "vocab_size": VOCAB,
        "eos_token_ids": (EOS,),
        "chunked_prefill_size": 64,
        "mixed_chunk": False,
        "aging_s": 0.0,
        **changes,
    }
    return SchedulerSettings(**values)  # type: ignore[arg-type]


class Recorder(World):
    """Keeps every plan that was launched."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.plans: list[Plan] = []
        launch = self.runner.launch

        def record(plan: Plan) -> OracleStep:
            self.plans.append(plan)
            return launch(plan)

        self.runner.launch = record  # type: ignore[method-assign]


class Patience(Feature):
    """Lets no request with an odd number in before it is told to."""

    def __init__(self) -> None:
        self.is_over = False

    def admit(self, request: Request) -> Admission:
        return Admission.WAIT if request.id % 2 and not self.is_over else Admission.READY
