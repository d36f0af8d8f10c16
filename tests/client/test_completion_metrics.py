"""What a completion leaves in the metrics when it has ended."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.text.tokens import byte_tokenizer
from weft.client import completion_metrics
from weft.client.completion_metrics import CompletionRecorder
from weft.client.front_delay import FrontDelay
from weft.client.front_times import FrontTimes
from weft.client.generation import Completion, CompletionSpec, Generation
from weft.messages.replies import WAIT_HEADER, Finish
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.observe.metrics import Metrics
from weft.observe.savings import MAX_TENANTS

ARRIVED_S = 100.0
ENDED_S = 104.0


def record(
    metrics: Metrics,
    finish: Finish,
    first_token_at: float,
    *,
    tenant: str = "",
    has_deadline: bool = False,
) -> FrontDelay:
    """Record a completion of four tokens, or of none, that arrives and ends at the times above.
    Returns what that has taught of the front's part."""
    spec = CompletionSpec(
        request=GenerateRequest(id=1, rid="r", sampling=SamplingParams(), tenant=tenant),
        choice=0,
        prompt_len=30,
        latency=metrics.completions.latencies[0],
        started_s=ARRIVED_S + 0.25,
        arrived_s=ARRIVED_S,
        front=FrontTimes(ARRIVED_S),
    )
    generation = Generation(stream=True, on_close=lambda generation: None)
    completion = Completion(spec, generation, byte_tokenizer().detokenizer())
    completion.first_token_at = first_token_at
    completion.warnings.append(("warning", "a grammar was simplified"))
    if has_deadline:
        completion.warnings.append((WAIT_HEADER, "5-9"))
    if first_token_at:
        for token in b"text":
            completion.push(token)
    end = completion.finish(finish)
    recorder = CompletionRecorder(metrics)
    recorder.record(completion, end, finish, is_logged=False)
    return recorder.delay


def sums(metrics: Metrics) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in parse(metrics.render().decode()):
        for sample in family.samples:
            name = sample.name.removeprefix("weft:")
            found[f"{name} {sample.labels.get('stage', '')}".strip()] = sample.value
    return found


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_metrics.time, "perf_counter", lambda: ENDED_S)


def test_stages_and_tokens_of_a_completion_are_counted() -> None:
    metrics = Metrics("m")
    finish = Finish(
        id=1,
        reason="stop",
        prompt_tokens=30,
        completion_tokens=4,
        cached_tokens=10,
        queue_s=0.25,
        prefill_s=0.5,
    )
    delay = record(metrics, finish, first_token_at=ARRIVED_S + 2.0, has_deadline=True)
    # From the arrival to the first token, without the engine's part.
    assert list(delay._delays_s) == [2.0 - 0.25 - 0.5]
    found = sums(metrics)
    stages = {
        stage: found[f"per_stage_req_latency_seconds_sum {stage}"]
        for stage in ("dispatch", "queue", "prefill", "decode")
    }
    assert stages == {"dispatch": 1.0, "queue": 0.25, "prefill": 0.5, "decode": 2.0}
    assert found["request_inference_time_seconds_sum"] == 2.5
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(2.0 / 3)
    assert found["e2e_request_latency_seconds_sum"] == 4.0
    assert found["queue_time_seconds_sum"] == 0.25
    assert found["prompt_tokens_histogram_sum"] == 30
    assert found["uncached_prompt_tokens_histogram_sum"] == 20
    assert found["generation_tokens_histogram_sum"] == 4
    assert found["num_requests_total"] == 1


def test_the_delay_of_the_front_is_measured_only_on_requests_with_a_deadline() -> None:
    finish = Finish(id=1, reason="stop", prompt_tokens=30)
    delay = record(Metrics("m"), finish, first_token_at=ARRIVED_S + 2.0)
    assert not delay._delays_s


def test_a_completion_that_failed_without_a_token_has_no_stages_of_the_model() -> None:
    metrics = Metrics("m")
    finish = Finish(
        id=1, reason="abort", message="too late", status=503, prompt_tokens=30, queue_s=3.0
    )
    delay = record(metrics, finish, first_token_at=0.0, has_deadline=True)
    assert not delay._delays_s
    found = sums(metrics)
    assert found["num_aborted_requests_total"] == 1
    assert found["num_failed_requests_total"] == 1
    assert found["queue_time_seconds_sum"] == 3.0
    assert found["request_inference_time_seconds_count"] == 0
    assert found["per_stage_req_latency_seconds_count decode"] == 0


def saved(metrics: Metrics, name: str) -> dict[str, float]:
    """By tenant."""
    found: dict[str, float] = {}
    for family in parse(metrics.render().decode()):
        for sample in family.samples:
            if sample.name == f"weft:cache_saved_{name}_total":
                found[sample.labels["tenant"]] = sample.value
    return found


def test_cached_tokens_count_for_their_tenant_as_tokens_and_as_the_time_of_computed_ones() -> None:
    metrics = Metrics("m")
    finish = Finish(
        id=1, reason="stop", prompt_tokens=30, completion_tokens=4, cached_tokens=10, prefill_s=0.5
    )
    record(metrics, finish, ARRIVED_S + 2.0, tenant="alice")
    record(metrics, finish, ARRIVED_S + 2.0)
    assert saved(metrics, "tokens") == {"alice": 10, "(none)": 10}
    # 20 tokens were computed in half a second.
    assert saved(metrics, "seconds") == pytest.approx({"alice": 0.25, "(none)": 0.25})


def test_the_fixed_time_of_a_prompt_is_not_counted_as_saved() -> None:
    metrics = Metrics("m")

    def end(num_computed: int, num_cached: int, prefill_s: float) -> None:
        finish = Finish(
            id=1,
            reason="stop",
            prompt_tokens=num_computed + num_cached,
            completion_tokens=4,
            cached_tokens=num_cached,
            prefill_s=prefill_s,
        )
        record(metrics, finish, ARRIVED_S + 2.0, tenant="alice")

    # A tenth of a second for each prompt, and 2 ms a token.
    for num_computed in (10, 100, 400):
        end(num_computed, 1, 0.1 + 0.002 * num_computed)
    before_s = saved(metrics, "seconds")["alice"]
    end(5, 300, 0.11)
    assert saved(metrics, "seconds")["alice"] - before_s == pytest.approx(0.6)


def test_however_many_tenants_there_are_the_page_names_no_more_than_a_bound() -> None:
    metrics = Metrics("m")
    savings = metrics.completions.savings
    savings.add("", 2, 1, 0.001)  # of no tenant
    for number in range(MAX_TENANTS + 5):
        savings.add(f"tenant-{number}", 2, 1, 0.001)
    savings.add("tenant-0", 2, 1, 0.001)
    found = saved(metrics, "tokens")
    assert len(found) == MAX_TENANTS + 2
    assert found["tenant-0"] == 4
    assert found["other"] == 10
