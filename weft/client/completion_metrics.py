"""What is remembered of a completion that has ended: in the metrics, in the log, and in a trace."""

from __future__ import annotations

import time

from weft.client.generation import Completion, CompletionEnd
from weft.messages.replies import Finish
from weft.observe.log import EventLog
from weft.observe.metrics import Metrics
from weft.observe.trace import CompletionTrace, NoTracer, Tracer

log = EventLog("client")


class CompletionRecorder:
    def __init__(self, metrics: Metrics, tracer: Tracer | None = None) -> None:
        self._metrics = metrics
        self._tracer = tracer or NoTracer()

    def ended(
        self, completion: Completion, end: CompletionEnd, finish: Finish | None, *, is_told: bool
    ) -> None:
        """`finish` is the engine's word, if it came to that. `is_told`: the log has a line also if it ended well."""
        now = time.perf_counter()
        stages = stage_times(completion, finish, now)
        self._count(completion, end, stages, now)
        total_s = now - completion.arrived_s
        write = log.info if is_told or end.reason in ("abort", "error") else log.debug
        write(
            "finished",
            rid=completion.rid,
            reason=end.reason,
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
            **{f"{stage}_s": seconds for stage, seconds in stages.items()},
            total_s=total_s,
            message=end.message or "-",
        )
        self._tracer.ended(
            CompletionTrace(
                rid=completion.rid,
                traceparent=completion.traceparent,
                began_s=completion.arrived_s,
                ended_s=now,
                stages=stages,
                attributes=_attributes(completion, end, stages, total_s, self._metrics.model_name),
                error=end.message if end.failed else "",
            )
        )

    def _count(
        self, completion: Completion, end: CompletionEnd, stages: dict[str, float], now: float
    ) -> None:
        metrics, latency = self._metrics, completion.latency
        metrics.finished(
            end.reason,
            end.status,
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            num_tokens=end.completion_tokens,
        )
        latency.e2e.observe_one(now - completion.arrived_s, completion.rid)
        if "queue" in stages:
            latency.queue.observe_one(stages["queue"], completion.rid)
        if "decode" in stages:
            metrics.staged(
                {stage: seconds for stage, seconds in stages.items() if stage != "tokenize"},
                end.completion_tokens,
                completion.rid,
            )


def stage_times(completion: Completion, finish: Finish | None, now: float) -> dict[str, float]:
    """Seconds that a completion spent in each stage, as far as it came and is known, in order.

    `dispatch` is the way to the engine and back; the two processes do not compare their clocks.
    """
    stages = {"tokenize": max(completion.began - completion.arrived_s, 0.0)}
    if (
        finish is None or not finish.prompt_tokens
    ):  # the engine has not seen it, or did not have the last word
        return stages
    first_s = completion.first_token_at
    if not first_s:
        return stages | {"queue": finish.queue_s}
    return stages | {
        "dispatch": max(first_s - completion.began - finish.queue_s - finish.prefill_s, 0.0),
        "queue": finish.queue_s,
        "prefill": finish.prefill_s,
        "decode": max(now - first_s, 0.0),
    }


def _attributes(
    completion: Completion,
    end: CompletionEnd,
    stages: dict[str, float],
    total_s: float,
    model_name: str,
) -> dict[str, str | int | float | list[str]]:
    """By the names that OpenTelemetry has for generative models."""
    params = completion.params
    found: dict[str, str | int | float | list[str]] = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.n": params.n,
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": [end.reason],
        "gen_ai.usage.prompt_tokens": end.prompt_tokens,
        "gen_ai.usage.completion_tokens": end.completion_tokens,
        "gen_ai.usage.cached_tokens": end.cached_tokens,
        "gen_ai.latency.e2e": total_s,
    }
    if params.max_new_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_new_tokens
    if "decode" in stages:
        found["gen_ai.latency.time_in_queue"] = stages["queue"]
        found["gen_ai.latency.time_to_first_token"] = (
            completion.first_token_at - completion.arrived_s
        )
        found["gen_ai.latency.time_in_model_prefill"] = stages["prefill"]
        found["gen_ai.latency.time_in_model_decode"] = stages["decode"]
    return found
