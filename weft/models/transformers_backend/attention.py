"""The attention function that modules of transformers call, and its `Listener`.

    transformers' decoder: embedding, norms, projections, rotation, feed-forward parts
       └─ attention(module, q, k, v, ...) ─▶ the `Listener` of the thread that computes

It is registered under one name for all models. No masks are registered under that name, so the
library builds none. This module knows neither pages nor steps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

NAME = "weft"
# Arguments that do not affect the computation.
IGNORED = {
    *("position_ids", "cache_position", "use_cache", "dropout", "training"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("logits_to_keep", "is_causal", "position_embeddings", "layer_idx"),
}


class AttentionCall(NamedTuple):
    """A module's call of attention."""

    layer: int
    query: Tensor  # [1, heads, T, D], rotated
    key: Tensor  # [1, kv_heads, T, D]
    value: Tensor  # [1, kv_heads, T, at most D]
    scale: float
    window: int  # 0: no window
    cap: float  # cap of scores; 0: none
    sinks: Tensor | None  # [heads]
    problem: str  # an argument that is not supported; "" if there is none


class Listener(Protocol):
    def attend(self, call: AttentionCall) -> Tensor:
        """[T, heads, size of a value]"""
        ...


_threads = threading.local()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send calls of attention in this thread to `listener`."""
    _threads.listener = listener
    try:
        yield
    finally:
        _threads.listener = None


def register() -> None:
    """Register the function with the library."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Called by the library: [1, heads, T, D] each -> [1, T, heads, D]"""
    listener: Listener = _threads.listener
    call = AttentionCall(
        layer=getattr(module, "layer_idx", -1),
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or 0,
        cap=softcap or 0.0,
        sinks=s_aux,
        problem=_problem(module, attention_mask, is_causal, others),
    )
    out = listener.attend(call)
    return out.to(query.dtype)[None], None


def _problem(
    module: Any, mask: Tensor | None, is_causal: bool | None, others: dict[str, Any]
) -> str:
    if is_causal is False or getattr(module, "is_causal", True) is False:
        return "lets tokens see those after them"
    if mask is not None:
        return "has a mask of its own"
    for name, value in others.items():
        is_said = value is not None and value is not False
        if is_said and name not in IGNORED:
            return f"passes {name} to attention"
    return ""
