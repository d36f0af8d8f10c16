"""`meta_info` of SGLang's answers: the numbers of one completion, on `/generate` and, where asked for, in chat."""

from __future__ import annotations

from typing import Any

from weft.client.generation import Completion, CompletionEnd, Delta


def meta_info(completion: Completion, delta: Delta, weight_version: str) -> dict[str, Any]:
    """As far as `delta`, with `weight_version` of now; what is known at the end only comes with the last one."""
    meta: dict[str, Any] = {
        "id": completion.rid,
        "finish_reason": None if delta.end is None else _finish_reason(delta.end),
        "prompt_tokens": completion.prompt_len if delta.end is None else delta.end.prompt_tokens,
        "completion_tokens": delta.num_tokens,
        "cached_tokens": 0 if delta.end is None else delta.end.cached_tokens,
        "weight_version": weight_version if delta.end is None else delta.end.weight_version,
    }
    if delta.end is not None:
        meta["e2e_latency"] = delta.end.e2e_s
    return meta


def _finish_reason(end: CompletionEnd) -> dict[str, Any]:
    match end.reason:
        case "stop":
            return {"type": "stop", "matched": end.matched}
        case "length":
            return {"type": "length", "length": end.completion_tokens}
        case reason:
            return {"type": reason, "message": end.message, "status_code": end.status}
