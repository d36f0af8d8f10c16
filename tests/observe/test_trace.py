"""Spans of a request, with the exporter in memory, and what is said where the libraries are
missing."""

from __future__ import annotations

import sys

import httpx
import pytest

from tests.server.fake import as_bytes, eventually, running
from weft.config.options import SettingsError
from weft.observe.trace import CompletionTrace, NoTracer, OtelTracer, make_tracer

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


class Remembered:
    """A tracer that keeps what it is told."""

    def __init__(self) -> None:
        self.traces: list[CompletionTrace] = []

    def ended(self, trace: CompletionTrace) -> None:
        self.traces.append(trace)

    def close(self) -> None:
        pass


def test_request_becomes_a_trace_with_its_stages() -> None:
    tracer = Remembered()
    with running(tracer=tracer) as server:
        server.engine.script = lambda ids: as_bytes("abc")
        headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01", "x-request-id": "r-1"}
        body = {"prompt": "xy", "n": 2, "temperature": 0.5, "max_tokens": 9}
        assert (
            httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code
            == 200
        )
        first, _ = tracer.traces
    assert first.rid == "r-1"
    assert TRACE_ID in first.traceparent
    assert list(first.stages) == ["tokenize", "dispatch", "queue", "prefill", "decode"]
    assert first.stages["queue"] == 0.001
    assert sum(first.stages.values()) == pytest.approx(first.ended_s - first.began_s, abs=0.02)
    assert first.attributes["gen_ai.request.n"] == 2
    assert first.attributes["gen_ai.request.temperature"] == 0.5
    assert first.attributes["gen_ai.request.max_tokens"] == 9
    assert first.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert first.attributes["gen_ai.usage.completion_tokens"] == 4
    assert first.error == ""


def test_refused_and_abandoned_requests_are_traced_too() -> None:
    tracer = Remembered()
    with running(tracer=tracer) as server:
        server.engine.full = True
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 503
        server.engine.full = False
        server.engine.hold = True
        server.leave("/v1/completions", {"prompt": "x"})
        assert eventually(lambda: len(tracer.traces) == 2)
    refused, abandoned = tracer.traces
    assert "queue is full" in refused.error
    assert abandoned.attributes["gen_ai.response.finish_reasons"] == ["abort"]


def trace(traceparent: str = "", error: str = "") -> CompletionTrace:
    return CompletionTrace(
        rid="r-1",
        traceparent=traceparent,
        began_s=10.0,
        ended_s=12.0,
        stages={"tokenize": 0.25, "dispatch": 0.25, "queue": 0.5, "prefill": 0.5, "decode": 0.5},
        attributes={"gen_ai.request.max_tokens": 5, "gen_ai.response.finish_reasons": ["stop"]},
        error=error,
    )


def test_spans_lie_below_that_of_the_client_and_one_after_the_other() -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    tracer = OtelTracer(export.SimpleSpanProcessor(exporter), "m")
    tracer.ended(trace(f"00-{TRACE_ID}-00f067aa0ba902b7-01"))
    tracer.ended(trace("nonsense", error="it broke"))
    tracer.ended(trace(f"00-{TRACE_ID}-00f067aa0ba902b7-00"))  # the client does not want this one
    tracer.close()
    spans = exporter.get_finished_spans()
    assert len(spans) == 12
    *stages, root = spans[:6]
    assert [span.name for span in stages] == [
        *("tokenize", "api_server_dispatch", "prefill_waiting", "prefill_forward", "decode_loop")
    ]
    assert root.name == "llm_request"
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert f"{root.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert all(span.parent.span_id == root.context.span_id for span in stages)
    assert [span.start_time for span in stages] == [
        root.start_time,
        *(span.end_time for span in stages[:-1]),
    ]
    assert stages[-1].end_time == root.end_time
    assert root.end_time - root.start_time == 2_000_000_000
    assert root.attributes["gen_ai.request.id"] == "r-1"
    broken = spans[11]
    assert broken.status.description == "it broke"
    assert f"{broken.context.trace_id:032x}" != TRACE_ID


def test_missing_extra_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SettingsError, match="pip install opentelemetry-sdk") as caught:
        make_tracer("http://127.0.0.1:4318/v1/traces", "m")
    assert "\n" not in str(caught.value)


def test_without_an_endpoint_nothing_is_traced_and_nothing_imported() -> None:
    assert isinstance(make_tracer("", "m"), NoTracer)
    with pytest.raises(SettingsError, match=r"127\.0\.0\.1:4317"):
        make_tracer("127.0.0.1:4317", "m")
