"""Traces with OpenTelemetry: one span per completion, with its stages as child spans, sent when the
completion has ended.

    llm_request ─┬─ tokenize            HTTP request received ─▶ its prompt is token ids
                 ├─ api_server_dispatch  ─▶ the engine has it; and the way back of the first token
                 ├─ prefill_waiting      ─▶ admitted
                 ├─ prefill_forward      ─▶ first token
                 └─ decode_loop          ─▶ last token

A W3C `traceparent` header of the client makes the span part of the client's trace. The libraries
are an optional extra; without them `make_tracer` raises an error that says so. Nothing is measured
only for traces: the times are those of the metrics and the log.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from weft.config.options import SettingsError
from weft.version import __version__

STAGE_NAMES = {
    "tokenize": "tokenize",
    "dispatch": "api_server_dispatch",
    "queue": "prefill_waiting",
    "prefill": "prefill_forward",
    "decode": "decode_loop",
}


@dataclass(frozen=True, kw_only=True)
class CompletionTrace:
    """One ended completion. Times are readings of `time.perf_counter`."""

    rid: str
    traceparent: str
    began_s: float
    ended_s: float
    stages: Mapping[str, float]  # seconds in each of its `STAGE_NAMES`, in order
    attributes: Mapping[str, str | int | float | list[str]]
    error: str  # the error message; empty if it succeeded


class Tracer(Protocol):
    def ended(self, trace: CompletionTrace) -> None:
        """Send the trace. Does not wait."""

    def close(self) -> None:
        """Send the remaining traces, within a second."""


class NoTracer:
    """No tracing."""

    def ended(self, trace: CompletionTrace) -> None:
        pass

    def close(self) -> None:
        pass


def make_tracer(endpoint: str, model_name: str) -> Tracer:
    """A tracer that sends to `endpoint` (OTLP over HTTP); without an endpoint, one that does
    nothing. Raises SettingsError."""
    if not endpoint:
        return NoTracer()
    if not endpoint.startswith(("http://", "https://")):
        raise SettingsError(
            f"--otlp-endpoint is {endpoint!r}; http://HOST:4318/v1/traces is expected"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise SettingsError(
            "--otlp-endpoint needs OpenTelemetry: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http"
        ) from exc
    return OtelTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model_name)


class OtelTracer:
    """Makes spans; `processor` (of the OpenTelemetry SDK) sends them, in its own thread."""

    def __init__(self, processor: Any, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "weft", "model_name": model_name})
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("weft", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, trace: CompletionTrace) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        epoch_ns = time.time_ns() - int(time.perf_counter() * 1e9)
        parent = self._propagator.extract(
            {"traceparent": trace.traceparent}
        )  # an invalid header counts as none
        at_ns = epoch_ns + int(trace.began_s * 1e9)
        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=at_ns,
            attributes={"gen_ai.request.id": trace.rid, **trace.attributes},
        )
        if trace.error:
            span.set_status(Status(StatusCode.ERROR, trace.error))
        below = set_span_in_context(span)
        for stage, seconds in trace.stages.items():
            child = self._tracer.start_span(STAGE_NAMES[stage], context=below, start_time=at_ns)
            at_ns += int(seconds * 1e9)
            child.end(end_time=at_ns)
        span.end(end_time=epoch_ns + int(trace.ended_s * 1e9))

    def close(self) -> None:
        self._provider.force_flush(1_000)
        self._provider.shutdown()
