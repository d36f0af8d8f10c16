"""Passes around the computation of steps: their order, what they cost, and one that is added from
outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.executor.driver import Driver, Turn, asking, make_driver
from weft.executor.device import DeviceOutput, do_here
from weft.executor.runner import Do, Pass, Run, TorchRunner
from weft.plan.device import DeviceReply, DeviceRequest, GetWeight
from weft.plan.step import Plan


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = make_driver(kernels="auto")
    yield made
    made.runner.close()


class Noting(Pass):
    """Writes down when it is entered and left."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self._notes = notes

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        self._notes.append(f"{self.name} in")
        output = then(plan)
        self._notes.append(f"{self.name} out")
        return output


class Refusing(Pass):
    """Answers requests itself, and has nothing to do with steps."""

    def do(self, request: DeviceRequest, then: Do) -> DeviceReply:
        if isinstance(request, GetWeight):
            return DeviceReply(ok=False, message="not today")
        return then(request)


def tokens(runner: TorchRunner, plan: Plan) -> list[int]:
    return runner.launch(plan).result().tokens.tolist()


def test_passes_stand_around_a_step_in_the_order_of_the_list(driver: Driver) -> None:
    notes: list[str] = []
    inner = driver.runner.within(Noting("inner", notes))
    runner = inner.within(Noting("outer", notes))
    assert [one.name for one in runner.passes] == ["outer", "inner"]
    plan = asking(driver.plan(Turn(0, [3, 5, 7])))
    assert tokens(runner, plan) == tokens(driver.runner, plan)
    assert notes == ["outer in", "inner in", "inner out", "outer out"]


def test_a_pass_of_requests_alone_costs_a_step_nothing(driver: Driver) -> None:
    runner = driver.runner.within(Refusing())
    assert runner._run == driver.runner._run
    reply = runner.control(GetWeight("model.embed_tokens.weight", 1)).result()
    assert (reply.ok, reply.message) == (False, "not today")
    assert driver.runner.control(GetWeight("model.embed_tokens.weight", 1)).result().ok


def test_a_pass_may_change_the_plan_and_answer_in_its_stead(driver: Driver) -> None:
    class OnlyFirst(Pass):
        def run(self, plan: Plan, then: Run) -> DeviceOutput:
            return then(replace(plan, tokens=plan.tokens * 0 + 9))

    plan = asking(driver.plan(Turn(0, [3, 5, 7])))
    nines = replace(plan, tokens=plan.tokens * 0 + 9)
    assert tokens(driver.runner.within(OnlyFirst()), plan) == tokens(driver.runner, nines)


def test_what_a_pass_raises_is_the_result_of_its_step_alone(driver: Driver) -> None:
    class Failing(Pass):
        def __init__(self) -> None:
            self.fails = True

        def run(self, plan: Plan, then: Run) -> DeviceOutput:
            if self.fails:
                raise MemoryError("no room for this")
            return then(plan)

    failing = Failing()
    runner = driver.runner.within(failing)
    plan = asking(driver.plan(Turn(0, [3, 5, 7])))
    step = runner.launch(plan)
    with pytest.raises(MemoryError, match="no room"):
        step.result()
    failing.fails = False
    assert tokens(runner, plan) == tokens(driver.runner, plan)


def test_a_runner_inside_another_computes_here_and_now(driver: Driver) -> None:
    plan = asking(driver.plan(Turn(0, [3, 5, 7])))
    here = do_here(lambda: driver.runner.run(plan).result().tokens.tolist()).result()
    assert here == tokens(driver.runner, plan)
    assert driver.runner.do(GetWeight("model.embed_tokens.weight", 1)).ok
