"""What the metrics page says: our names, those of others, exemplars, and no label that clients can
multiply."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from weft.observe.compat import SYSTEMS
from weft.observe.metrics import MAX_PRIORITIES, CompletionMetrics, Histogram, Metrics

ROOT = Path(__file__).parents[2]
STAGES = {"dispatch": 0.001, "queue": 0.2, "prefill": 0.3, "decode": 1.5}
NUMBERS = {
    "num_running": 3,
    "num_waiting": 0,
    "total_retractions": 0,
    "kv_used": 20,
    "kv_evictable": 30,
    "kv_tokens": 100,
    "total_prompt_tokens": 40,
}


def filled(compat: str = "none") -> Metrics:
    """Metrics after a request, so that each has a value."""
    metrics = Metrics("m", compat)
    metrics.engine.set(
        NUMBERS | {"total_cached_tokens": 10, "total_generated_tokens": 4, "busy_s": 1.5},
        now=0.0,
    )
    metrics.started([("weights", 0.5)], page_size=16, num_pages=6)
    fill_completions(metrics.completions)
    metrics.refused("max_n")
    metrics.http.active.inc()
    metrics.http.requests.labels("/generate", "POST").inc()
    metrics.http.responses.labels("/generate", "200").inc()
    metrics.http.seconds.of("/generate").observe_one(2.1)
    metrics.unknown_fields(1)
    return metrics


def fill_completions(completions: CompletionMetrics) -> None:
    """One that stopped, and one that was aborted with an error before it had a token."""
    completions.params_n.observe_one(2)
    completions.params_max_tokens.observe_one(100)
    latency = completions.latencies[0]
    latency.first_token.observe_one(0.5, "r-1")
    latency.e2e.observe_one(2.0, "r-1")
    latency.queue.observe_one(0.2, "r-1")
    latency.gaps.extend([0.01, 0.02])
    completions.latencies.count_gaps()
    completions.ended.labels("m", "stop").inc()
    completions.ended.labels("m", "abort").inc()
    completions.aborted.labels("m").inc()
    completions.failed.labels("m", "503").inc()
    for _ in range(2):
        completions.prompt_tokens.observe_one(30)
    completions.uncached_tokens.observe_one(20)
    completions.uncached_tokens.observe_one(30)
    completions.generation_tokens.observe_one(4)
    for stage, seconds in STAGES.items():
        completions.stages[stage].observe_one(seconds, "r-1")
    completions.inference.observe_one(1.8, "r-1")
    completions.time_per_token.observe_one(0.5, "r-1")


def values(metrics: Metrics) -> dict[str, float]:
    """Name and labels of each value, as they stand on the page."""
    return {
        sample.name
        + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in parse(metrics.render().decode())
        for sample in family.samples
    }


def test_numbers_stand_under_their_names() -> None:
    found = values(filled())
    assert found["weft:num_running_reqs model_name=m"] == 3
    assert found["weft:token_usage model_name=m"] == 0.2
    assert found["weft:kv_available_tokens model_name=m"] == 50
    assert found["weft:cache_hit_rate model_name=m"] == 0.25
    assert found["weft:inter_token_latency_seconds_count model_name=m priority=0"] == 2
    assert found["weft:per_stage_req_latency_seconds_sum model_name=m stage=prefill"] == 0.3
    assert found["weft:request_time_per_output_token_seconds_sum model_name=m"] == 0.5
    assert found["weft:request_inference_time_seconds_sum model_name=m"] == 1.8
    assert found["weft:uncached_prompt_tokens_histogram_sum model_name=m"] == 50
    assert found["weft:num_failed_requests_total model_name=m status_code=503"] == 1
    assert found["weft:refused_total limit=max_n"] == 1
    assert found["weft:http_request_duration_seconds_count endpoint=/generate model_name=m"] == 1
    assert found["weft:startup_time_seconds phase=weights"] == 0.5
    assert found["weft:process_resident_memory_bytes component=front"] > 1_000_000
    assert found["weft:engine_responding"] == 1


@pytest.mark.parametrize("system", SYSTEMS)
def test_other_names_tell_the_same_values(system: str) -> None:
    metrics = filled(system)
    families = {family.name: family for family in parse(metrics.render().decode())}
    for theirs, ours in SYSTEMS[system].names.items():
        plain, _, picked = ours.removesuffix("}").partition("{")
        key, _, wanted = picked.partition("=")
        kept = [
            one
            for one in families[f"weft:{plain}"].samples
            if not picked or one.labels[key] == wanted
        ]
        told = families[SYSTEMS[system].prefix + theirs].samples
        assert [one.value for one in told] == pytest.approx([one.value for one in kept], abs=0.5), (
            theirs
        )
        assert all(SYSTEMS[system].labels.items() <= one.labels.items() for one in told)


def test_names_that_routers_read_are_there() -> None:
    vllm = values(filled("vllm"))
    assert vllm["vllm:num_requests_running engine=0 model_name=m"] == 3
    assert vllm["vllm:kv_cache_usage_perc engine=0 model_name=m"] == 0.2
    assert vllm["vllm:request_success_total engine=0 finished_reason=stop model_name=m"] == 1
    assert vllm["vllm:request_prefill_time_seconds_sum engine=0 model_name=m"] == 0.3
    assert vllm["vllm:cache_config_info block_size=16 engine=0 num_gpu_blocks=6"] == 1
    sglang = values(filled("sglang"))
    assert sglang["sglang:token_usage engine_type=unified model_name=m pp_rank=0 tp_rank=0"] == 0.2


def test_exemplars_name_the_request_in_openmetrics() -> None:
    page = filled("vllm").render_open().decode()
    found = {
        sample.name: sample.exemplar
        for family in parse_open(page)
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert found["weft:time_to_first_token_seconds_bucket"].labels == {"rid": "r-1"}
    assert found["weft:time_to_first_token_seconds_bucket"].value == 0.5
    assert found["vllm:e2e_request_latency_seconds_bucket"].labels == {"rid": "r-1"}


def test_exemplar_lies_in_its_bucket_and_a_long_name_is_none() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe_one(1.5, "a")
    histogram.observe_one(9.0, "b" * 200)
    assert [
        (bound, count, exemplar and exemplar.labels["rid"])
        for bound, count, exemplar in histogram.buckets
    ] == [
        ("1.0", 0, None),
        ("2.0", 1, "a"),
        ("+Inf", 2, None),
    ]


def test_engines_that_are_started_again_go_on_with_their_numbers() -> None:
    metrics = Metrics("m")
    fleet = metrics.split(2)
    fleet.restarts.labels("1").inc()
    assert metrics.split(2) is fleet
    assert 'weft:engine_restarts_total{dp_rank="1"} 1.0' in metrics.render().decode()


def test_priorities_have_latencies_of_their_own_up_to_a_bound() -> None:
    metrics = Metrics("m")
    metrics.completions.latencies[5].gaps.append(1.0)
    metrics.completions.latencies.count_gaps()
    assert values(metrics)["weft:inter_token_latency_seconds_sum model_name=m priority=5"] == 1.0
    for priority in range(1_000, 3_000):
        metrics.completions.latencies[priority].gaps.append(0.5)
    metrics.completions.latencies.count_gaps()
    text = metrics.render().decode()
    priorities = set(
        re.findall(r'weft:inter_token_latency_seconds_count{.*priority="([^"]*)"', text)
    )
    assert len(priorities) == MAX_PRIORITIES + 1
    assert "other" in priorities
    assert (
        sum(
            value
            for name, value in values(metrics).items()
            if "token_latency_seconds_count" in name
        )
        == 2_001
    )


def test_dashboard_asks_only_for_what_there_is() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "weft.json").read_text("utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked += [one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    assert len(asked) > 20
    metrics = filled()
    metrics.completions.savings.add("alice", 16, 1, 0.001)
    there = {
        sample.name for family in parse(metrics.render().decode()) for sample in family.samples
    }
    labels = {
        key
        for family in parse(metrics.render().decode())
        for one in family.samples
        for key in one.labels
    }
    for expression in asked:
        names = set(re.findall(r"weft:\w+", expression))
        assert names, expression
        assert names <= there, expression
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert {label.strip() for label in group.split(",")} <= labels | {"instance"}, (
                expression
            )
