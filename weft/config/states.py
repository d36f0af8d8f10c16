"""Computes how many states are kept beside K and V, for layers that keep one state per sequence.

    num_bytes = kv_tokens * bytes_per_token + slots(kv_tokens) * bytes_per_slot

A running request has one state, and the prefix cache keeps states of earlier prompts and outputs: a
cached prefix can be used only up to a position with a state. So K and V and the states each get a
part of the memory, in bytes. This module knows no device and no setting.
"""

from __future__ import annotations

from dataclasses import replace

from weft.config.model import ModelConfig
from weft.config.windows import TYPICAL_LEN, KvPools, StateShare

# Bytes of states per byte of K and V. If a state is as large as K and V of 1,600 tokens, one state
# is kept per 3,200 tokens: chats of that length are found again, each up to its end.
DEFAULT_RATIO = 0.5
# Limit for small states, per short request: its own state, its last copy, and one that the cache
# keeps at an earlier end.
STATES_PER_REQUEST = 3
LEAST_SLOTS = 4  # without a setting: two requests, and the states that they continue


def with_states(
    pools: KvPools,
    model: ModelConfig,
    *,
    num_slots: int,
    ratio: float,
    context_length: int,
) -> KvPools:
    """The pools with room for states, if layers of the model keep some.

    `num_slots`: number of slots; 0: computed from `ratio`. `ratio`: bytes of states per byte of KV;
    0: `DEFAULT_RATIO`, or less if states are small. Without KV there is no ratio: the states of
    requests are counted as if each had `context_length` tokens.
    """
    num_bytes = model.state_bytes
    if not num_bytes:
        return pools
    per_byte = pools.bytes_per_token / num_bytes
    if num_slots:
        share = StateShare(bytes_per_slot=num_bytes, least=num_slots, per_token=0.0)
    elif not pools.bytes_per_token:
        per_token = STATES_PER_REQUEST / context_length
        share = StateShare(bytes_per_slot=num_bytes, least=LEAST_SLOTS, per_token=per_token)
    elif ratio:
        share = StateShare(bytes_per_slot=num_bytes, least=LEAST_SLOTS, per_token=ratio * per_byte)
    else:
        useful = STATES_PER_REQUEST / TYPICAL_LEN
        per_token = min(DEFAULT_RATIO * per_byte, useful)
        share = StateShare(bytes_per_slot=num_bytes, least=LEAST_SLOTS, per_token=per_token)
    return replace(pools, states=share)
