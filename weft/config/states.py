"""How many states are kept beside K and V, of layers that keep one for each sequence.

    num_bytes = kv_tokens * bytes_per_token + slots(kv_tokens) * bytes_per_slot

A running request has one state, and the prefix cache keeps those of earlier prompts and outputs: a
prompt is found no further than a state is. So both take a part of the memory, in bytes. It knows no
device and no setting.
"""

from __future__ import annotations

from dataclasses import replace

from weft.config.model import ModelConfig
from weft.config.windows import TYPICAL_LEN, KvPools, StateShare

# Bytes of states for a byte of K and V. Where a state is as large as K and V of 1,600 tokens, one
# is kept for 3,200 tokens: chats of that length are found again, each up to its end.
DEFAULT_RATIO = 0.5
# Where states are small, no more than these for a short request: its own, its last copy, and one
# that the cache keeps of an earlier end.
STATES_PER_REQUEST = 3
LEAST_SLOTS = 4  # unless others are asked for: two requests, and what they begin behind


def with_states(
    pools: KvPools,
    model: ModelConfig,
    *,
    num_slots: int,
    ratio: float,
) -> KvPools:
    """The pools with room for states, if layers of the model keep some.

    `num_slots`: number of slots; 0: computed from `ratio`. `ratio`: bytes of states per byte of KV;
    0: `DEFAULT_RATIO`, or less if states are small.
    """
    num_bytes = model.state_bytes
    if not num_bytes:
        return pools
    per_byte = pools.bytes_per_token / num_bytes
    if num_slots:
        share = StateShare(bytes_per_slot=num_bytes, least=num_slots, per_token=0.0)
    elif ratio:
        share = StateShare(bytes_per_slot=num_bytes, least=LEAST_SLOTS, per_token=ratio * per_byte)
    else:
        useful = STATES_PER_REQUEST / TYPICAL_LEN
        per_token = min(DEFAULT_RATIO * per_byte, useful)
        share = StateShare(bytes_per_slot=num_bytes, least=LEAST_SLOTS, per_token=per_token)
    return replace(pools, states=share)
