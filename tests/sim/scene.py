"""What simulations of these tests have in common."""

from __future__ import annotations

from weft.scheduler.settings import SchedulerSettings
from weft.sim.trace import EOS

SCENE = SchedulerSettings(
    num_pages=200,
    page_size=16,
    max_running_requests=8,
    context_length=512,
    vocab_size=1_000,
    eos_token_ids=(EOS,),
    chunked_prefill_size=64,
    mixed_chunk=False,
    aging_s=0.0,
)
