"""Divides KV memory between layers that see all tokens and layers with a sliding window.

    num_bytes = kv_tokens * bytes_per_token + window_tokens(kv_tokens) * window_bytes

Layers with windows need the tokens that running requests see and those that the prefix cache keeps
at the ends of sequences. Their number per token of the other pool, `ratio`, depends on the length
of requests. If all layers have windows, the other pool takes no memory; its pages are only numbers.
This module knows no device and no setting.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from weft.config.model import ModelConfig

TYPICAL_LEN = 512  # tokens of one request, to estimate how many requests a KV cache holds
TYPICAL_PART = 8  # a typical request with long contexts has 1/8 of a context
# Windows per request: the one that it sees, and one that the cache keeps at an earlier end.
WINDOWS_PER_REQUEST = 2
LARGEST = 1 << 40  # tokens: more than any pool has


@dataclass(frozen=True, kw_only=True)
class StateShare:
    """The states beside K and V, of layers that keep one state per sequence."""

    bytes_per_slot: int
    least: int  # minimum of slots
    per_token: float  # slots per token of KV

    def slots(self, kv_tokens: int) -> int:
        return max(self.least, int(kv_tokens * self.per_token))


@dataclass(frozen=True, kw_only=True)
class KvPools:
    """The memory of KV per token. Without `window` there is one pool for all layers."""

    bytes_per_token: int  # bytes in all layers, or with `window` in those without windows
    page_size: int
    window: int = 0  # tokens that the widest layer with a window sees; 0: one pool
    window_bytes: int = 0  # bytes of a token in layers with windows
    least: int = 0  # minimum of window tokens with which a request can run
    ratio: float = 1.0  # window tokens per token of the other pool
    states: StateShare | None = None  # None: no layer keeps a state

    def window_tokens(self, kv_tokens: int) -> int:
        """Tokens in the pool of layers with windows, if the other pool has `kv_tokens`."""
        if not self.window:
            return 0
        return self._rounded_up(max(self.least, int(kv_tokens * self.ratio)))

    def state_slots(self, kv_tokens: int) -> int:
        """Number of states beside `kv_tokens`."""
        return 0 if self.states is None else self.states.slots(kv_tokens)

    def num_bytes(self, kv_tokens: int) -> int:
        """Bytes of all pools."""
        in_windows = self.window_tokens(kv_tokens) * self.window_bytes
        in_states = 0
        if self.states is not None:
            in_states = self.states.slots(kv_tokens) * self.states.bytes_per_slot
        return kv_tokens * self.bytes_per_token + in_windows + in_states

    def fitting(self, num_bytes: int) -> int:
        """The largest number of tokens, in whole pages, whose pools fit into `num_bytes`."""
        if num_bytes <= 0:
            return 0

        def needed(num_pages: int) -> int:
            return self.num_bytes(num_pages * self.page_size)

        num_pages = bisect_right(range(LARGEST // self.page_size), num_bytes, key=needed) - 1
        return max(num_pages, 0) * self.page_size

    def _rounded_up(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size


def one_pool(model: ModelConfig, page_size: int) -> KvPools:
    """One pool, in which all layers keep all tokens."""
    return KvPools(bytes_per_token=model.kv_bytes_per_token, page_size=page_size)


def with_draft(
    model: ModelConfig, draft: ModelConfig, page_size: int, num_ranks: int = 1
) -> KvPools:
    """One pool, in which each slot holds a token in all layers of a model and its draft model. Of
    `num_ranks` ranks each has the states that a head reads."""
    per_token = model.kv_bytes_per_token + draft.kv_bytes_per_token
    if draft.head is not None:
        per_token += num_ranks * draft.head.kept_bytes
    return KvPools(bytes_per_token=per_token, page_size=page_size)


def two_pools(
    model: ModelConfig,
    *,
    page_size: int,
    chunk_len: int,
    context_length: int,
    ratio: float,
    is_chosen: bool,
) -> KvPools:
    """Two pools, in which layers with windows keep only their windows; one pool if windows are as
    long as a context.

    `chunk_len`: tokens of a prompt in one step; 0 or less if prompts are never cut. `ratio`: 0
    computes it for requests of a typical length. `is_chosen`: the user gave the size of the other
    pool.
    """
    windows = [model.window(layer) for layer in range(model.num_layers)]
    window = max(windows)
    least = least_window_tokens(window, page_size, chunk_len)
    # A prompt that is not cut needs all its tokens in the window pool together.
    if not window or chunk_len <= 0 or least >= context_length:
        return one_pool(model, page_size)
    num_windowed = sum(1 for one in windows if one)
    window_bytes = 0
    for layer, one in enumerate(windows):
        if one:
            window_bytes += model.kv_bytes(layer)
    typical = max(TYPICAL_LEN, context_length // TYPICAL_PART)
    row = window + 2 * page_size
    if not ratio:
        ratio = min(1.0, WINDOWS_PER_REQUEST * row / typical)
        if num_windowed == model.num_kv_layers and not is_chosen:
            # Only windows take memory; the other pool has enough pages for the longest requests.
            ratio = min(ratio, row / context_length)
    return KvPools(
        bytes_per_token=model.kv_bytes_per_token - window_bytes,
        page_size=page_size,
        window=window,
        window_bytes=window_bytes,
        least=least,
        ratio=ratio,
    )


def least_window_tokens(window: int, page_size: int, step_tokens: int) -> int:
    """The smallest window pool, in tokens, in which one request can run, in steps of
    `step_tokens`."""
    # A cached window before the step, one after it, and partly filled pages.
    num_windows = 2 * -(-window // page_size)
    num_pages = num_windows + -(-max(step_tokens, 0) // page_size) + 4
    return num_pages * page_size
