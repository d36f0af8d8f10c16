"""Record a completion that has ended: numbers in the metrics, a line in the log, a trace.

    arrived ──tokenize──▶ started ──dispatch, queue, prefill──▶ first token ──decode──▶ now

The stages between start and first token come from the engine's final message, because the clocks of
two processes cannot be compared; `dispatch` is the rest: the way to the engine and back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from logging import DEBUG

from weft.client.front_delay import FrontDelay
from weft.client.front_times import FrontTimes
from weft.client.generation import Completion
from weft.client.slow_requests import SlowRequests
from weft.messages.replies import WAIT_HEADER, Finish
from weft.observe.log import EventLog
from weft.observe.metrics import Metrics
from weft.observe.trace import CompletionTrace, NoTracer, Tracer

log = EventLog("client")


class CompletionRecorder:
    """`slow` hears of each completion that ends; None: nobody asks why one was slow."""

    def __init__(
        self,
        metrics: Metrics,
        tracer: Tracer | None = None,
        slow: SlowRequests | None = None,
    ) -> None:
        self._slow = slow
        self._metrics = metrics
        self.delay = FrontDelay()
        # The front's times of requests, by number, the oldest first; the client writes them.
        self.fronts: dict[int, FrontTimes] = {}
        # None: no tracer reads traces, so none are made.
        self._tracer = None if isinstance(tracer, NoTracer) else tracer

    def record(
        self,
        completion: Completion,
        end: Finish,
        finish: Finish | None,
        *,
        is_logged: bool,
    ) -> None:
        """Record an ended completion. `finish`: the engine's final message, if there was one.
        `is_logged`: also log completions without an error."""
        now = time.perf_counter()
        stages = stage_times(completion, finish, now)
        # Only requests with a deadline get a text about their wait.
        has_deadline = WAIT_HEADER in dict(completion.warnings)
        if has_deadline and "dispatch" in stages:
            self.delay.learn(stages["tokenize"] + stages["dispatch"])
        self._count(completion, end, stages, now)
        if is_logged or end.reason in ("abort", "error"):
            self._log(log.info, completion, end, stages, now)
        elif log.is_enabled_for(DEBUG):
            self._log(log.debug, completion, end, stages, now)
        if self._slow is not None and finish is not None:
            self._slow.note(completion, now)
        if self._tracer is not None:
            self._tracer.ended(self._trace(completion, end, stages, now))

    def _count(
        self,
        completion: Completion,
        end: Finish,
        stages: dict[str, float],
        now: float,
    ) -> None:
        metrics = self._metrics.completions
        model_name = self._metrics.model_name
        spec = completion.spec
        rid = spec.request.rid
        metrics.ended.labels(model_name, end.reason).inc()
        if end.reason == "abort":
            metrics.aborted.labels(model_name).inc()
        if end.status >= 400:
            metrics.failed.labels(model_name, str(end.status)).inc()
        metrics.prompt_tokens.observe_one(end.prompt_tokens)
        metrics.uncached_tokens.observe_one(end.prompt_tokens - end.cached_tokens)
        metrics.generation_tokens.observe_one(end.completion_tokens)
        spec.latency.e2e.observe_one(now - spec.arrived_s, rid)
        if "queue" in stages:
            spec.latency.queue.observe_one(stages["queue"], rid)
        if "decode" not in stages:
            return  # the completion has no token
        for stage, histogram in metrics.stages.items():
            histogram.observe_one(stages[stage], rid)
        decode_s = stages["decode"]
        metrics.inference.observe_one(stages["prefill"] + decode_s, rid)
        if end.completion_tokens > 1:
            metrics.time_per_token.observe_one(decode_s / (end.completion_tokens - 1), rid)
        if end.cached_tokens:
            num_computed = end.prompt_tokens - end.cached_tokens
            tenant = spec.request.tenant
            metrics.savings.add(tenant, end.cached_tokens, num_computed, stages["prefill"])

    def _log(
        self,
        write: Callable[..., None],
        completion: Completion,
        end: Finish,
        stages: dict[str, float],
        now: float,
    ) -> None:
        stage_fields = {f"{stage}_s": seconds for stage, seconds in stages.items()}
        write(
            "finished",
            rid=completion.spec.request.rid,
            reason=end.reason,
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
            **stage_fields,
            total_s=now - completion.spec.arrived_s,
            message=end.message or "-",
        )

    def _trace(
        self,
        completion: Completion,
        end: Finish,
        stages: dict[str, float],
        now: float,
    ) -> CompletionTrace:
        spec = completion.spec
        attributes = _attributes(completion, end, stages, now - spec.arrived_s)
        attributes["gen_ai.response.model"] = self._metrics.model_name
        return CompletionTrace(
            rid=spec.request.rid,
            traceparent=spec.traceparent,
            began_s=spec.arrived_s,
            ended_s=now,
            stages=stages,
            attributes=attributes,
            error=end.message if end.failed else "",
        )


def stage_times(completion: Completion, finish: Finish | None, now: float) -> dict[str, float]:
    """Seconds in each stage, in order, as far as the completion got and the times are known."""
    spec = completion.spec
    stages = {"tokenize": max(spec.started_s - spec.arrived_s, 0.0)}
    if finish is None or not finish.prompt_tokens:
        # the engine has not seen the request, or the completion ended without its message
        return stages
    if not completion.first_token_at:
        stages["queue"] = finish.queue_s
        return stages
    to_first_s = completion.first_token_at - spec.started_s
    stages["dispatch"] = max(to_first_s - finish.queue_s - finish.prefill_s, 0.0)
    stages["queue"] = finish.queue_s
    stages["prefill"] = finish.prefill_s
    stages["decode"] = max(now - completion.first_token_at, 0.0)
    return stages


def _attributes(
    completion: Completion,
    end: Finish,
    stages: dict[str, float],
    total_s: float,
) -> dict[str, str | int | float | list[str]]:
    """The trace attributes, under OpenTelemetry's names for generative models."""
    spec = completion.spec
    params = spec.request.sampling
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.n": params.n,
        "gen_ai.response.finish_reasons": [end.reason],
        "gen_ai.usage.prompt_tokens": end.prompt_tokens,
        "gen_ai.usage.completion_tokens": end.completion_tokens,
        "gen_ai.usage.cached_tokens": end.cached_tokens,
        "gen_ai.latency.e2e": total_s,
    }
    if params.max_new_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_new_tokens
    if "decode" in stages:
        to_first_token_s = completion.first_token_at - spec.arrived_s
        attributes["gen_ai.latency.time_in_queue"] = stages["queue"]
        attributes["gen_ai.latency.time_to_first_token"] = to_first_token_s
        attributes["gen_ai.latency.time_in_model_prefill"] = stages["prefill"]
        attributes["gen_ai.latency.time_in_model_decode"] = stages["decode"]
    return attributes
