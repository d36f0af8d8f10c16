"""How many states are kept unless it is said: simulated chats find what they have said before."""

from __future__ import annotations

from weft.config.states import DEFAULT_RATIO
from weft.scheduler.pace.step_cost import CostModel
from weft.scheduler.settings import SchedulerSettings, StateSettings
from weft.sim.report import Slo, summarize
from weft.sim.run import simulate
from weft.sim.synthetic import Traffic, synthetic
from weft.sim.trace import EOS, VOCAB_SIZE

# Of Qwen3.5: a state is as large as K and V of so many tokens.
TOKENS_OF_STATE = 1_600
MEMORY = 330_000  # in tokens
NEVER = Slo(float("inf"), float("inf"))
CHATS = Traffic(
    requests=150,
    rate=2.0,
    turns=6,
    think=5.0,
    input_len="lognormal:200",
    output_len="lognormal:300",
    max_tokens=1_024,
    prefixes=4,
    prefix_len=600,
)


def hit_rate(ratio: float) -> float:
    kv_tokens = int(MEMORY / (1 + ratio))
    num_slots = int(MEMORY - kv_tokens) // TOKENS_OF_STATE
    settings = SchedulerSettings(
        num_pages=kv_tokens // 16,
        page_size=16,
        max_running_requests=min(256, num_slots),
        context_length=16_384,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        chunked_prefill_size=512,
        mixed_chunk=True,
        max_queued_requests=100_000,
        states=StateSettings(num_slots=num_slots),
    )
    cost = CostModel(step_s=0.02, token_s=0.0005, context_s=1e-8)
    return summarize(simulate(settings, cost, synthetic(CHATS)), NEVER).hit_rate


def test_chats_are_found_again_beside_running_requests() -> None:
    # It is 0.90, also with twice as many states, and 0.44 with a quarter.
    assert hit_rate(DEFAULT_RATIO) > 0.85


def test_with_a_quarter_of_the_states_they_are_not() -> None:
    assert hit_rate(DEFAULT_RATIO / 4) < 0.6
