"""A machine that was never measured: round figures."""

from __future__ import annotations

import numpy as np

from weft.capacity.machine import FrontCost, MeasuredMachine
from weft.capacity.trial import TrialSettings
from weft.capacity.workload import ChatUsers
from weft.scheduler.settings import SchedulerSettings
from weft.sim.curve import StepCurve
from weft.sim.report import Slo
from weft.sim.synthetic import Lengths
from weft.sim.trace import EOS

SETTINGS = SchedulerSettings(
    num_pages=500,
    page_size=16,
    max_running_requests=8,
    context_length=1_024,
    vocab_size=1_000,
    eos_token_ids=(EOS,),
    chunked_prefill_size=512,
    max_slowdown=-1.0,
    speculative="off",
    aging_s=0.0,
)
CURVE = StepCurve(
    step_s=0.01, knots=(1, 16), token_s=(0.0001, 0.001), context_s=1e-7, sample_s=1e-4
)
# Half of the time a tenth faster, half of the time slower.
STRETCHES = ((0.0, 0.9, 1.0), (0.9, 2.0, 1.0))
MACHINE = MeasuredMachine(
    name="a round machine",
    model="weft-nano",
    options={"threads": 1},
    settings=SETTINGS,
    overlaps=False,
    curve=CURVE,
    front=FrontCost(request_s=0.002),
    stretches=STRETCHES,
)
USERS = ChatUsers(
    prompt=Lengths.parse("40", "--prompt"),
    output=Lengths.parse("uniform:10:30", "--output"),
    turns=2,
    think_s=1.0,
    context_length=1_024,
    vocab_size=1_000,
    requests=16,
)
WANTED = TrialSettings(Slo(ttft_s=0.15, itl_s=0.02), share=0.9)


def ids(*tokens: int) -> bytes:
    """Tokens as an output has them."""
    return np.array(tokens, dtype=np.int32).tobytes()
