"""The metrics of weft under the names of other engines, for dashboards and routers made for those.

One table per engine: its name for a value, and ours. The values are read from our own metrics when
a page is requested, so both always agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

OURS = "weft:"


class System(NamedTuple):
    """The names that one engine uses."""

    prefix: str
    labels: dict[str, str]  # extra labels on every value, in addition to ours
    renamed_labels: dict[str, str]  # our name: its name
    names: dict[str, str]  # its name: our name


_SAME_IN_SGLANG = (
    *(
        "num_running_reqs",
        "num_queue_reqs",
        "token_usage",
        "swa_token_usage",
        "mamba_usage",
        "num_used_tokens",
        "kv_available_tokens",
    ),
    *(
        "kv_evictable_tokens",
        "max_total_num_tokens",
        "new_token_ratio",
        "cache_hit_rate",
        "gen_throughput",
    ),
    *("prompt_tokens", "generation_tokens", "cached_tokens", "evicted_tokens"),
    *("num_requests", "num_aborted_requests", "num_retracted_requests"),
    *(
        "num_prefill_bootstrap_queue_reqs",
        "num_prefill_inflight_queue_reqs",
        "num_decode_prealloc_queue_reqs",
        "num_decode_transfer_queue_reqs",
    ),
    *("num_grammar_queue_reqs", "num_grammar_cache_hit", "num_grammar_aborted"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *(
        "request_time_per_output_token_seconds",
        "queue_time_seconds",
        "per_stage_req_latency_seconds",
    ),
    *("prompt_tokens_histogram", "generation_tokens_histogram", "uncached_prompt_tokens_histogram"),
    *("http_requests", "http_responses", "http_requests_active"),
    *("startup_time_seconds", "process_cpu_seconds"),
)

SYSTEMS = {
    "sglang": System(
        prefix="sglang:",
        labels={"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"},
        renamed_labels={"block_size": "page_size", "num_gpu_blocks": "num_pages"},
        names={name: name for name in (*_SAME_IN_SGLANG, "cache_config_info")},
    ),
    "vllm": System(
        prefix="vllm:",
        labels={"engine": "0"},
        renamed_labels={"finish_reason": "finished_reason"},
        names={
            "num_requests_running": "num_running_reqs",
            "num_requests_waiting": "num_queue_reqs",
            "kv_cache_usage_perc": "token_usage",
            "cache_config_info": "cache_config_info",
            "prompt_tokens": "prompt_tokens",
            "generation_tokens": "generation_tokens",
            "prompt_tokens_cached": "cached_tokens",
            "prefix_cache_queries": "prompt_tokens",
            "prefix_cache_hits": "cached_tokens",
            "request_success": "num_requests",
            "num_preemptions": "num_retracted_requests",
            "time_to_first_token_seconds": "time_to_first_token_seconds",
            "inter_token_latency_seconds": "inter_token_latency_seconds",
            "e2e_request_latency_seconds": "e2e_request_latency_seconds",
            "request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
            "request_queue_time_seconds": "queue_time_seconds",
            "request_inference_time_seconds": "request_inference_time_seconds",
            "request_prefill_time_seconds": "per_stage_req_latency_seconds{stage=prefill}",
            "request_decode_time_seconds": "per_stage_req_latency_seconds{stage=decode}",
            "request_prompt_tokens": "prompt_tokens_histogram",
            "request_generation_tokens": "generation_tokens_histogram",
            "request_params_n": "request_params_n",
            "request_params_max_tokens": "request_params_max_tokens",
            "http_requests": "http_requests",
            "http_request_duration_seconds": "http_request_duration_seconds",
        },
    ),
}


class Renamed(Collector):
    """The metrics of `registry`, repeated under the names of a system."""

    def __init__(self, system: str, registry: CollectorRegistry) -> None:
        self._system = SYSTEMS[system]
        self._registry = registry
        self._is_busy = False  # the registry collects from us, too

    def collect(self) -> Iterator[Metric]:
        if self._is_busy:
            return
        self._is_busy = True
        try:
            ours = {family.name: family for family in self._registry.collect()}
        finally:
            self._is_busy = False
        for name, source in self._system.names.items():
            plain, _, picked = source.removesuffix("}").partition("{")
            yield self._renamed(self._system.prefix + name, ours[OURS + plain], picked)

    def _renamed(self, name: str, family: Metric, picked: str) -> Metric:
        """`family` under the name `name`. `picked` ("stage=decode") selects the samples with that
        label; empty: all."""
        renamed = Metric(name, family.documentation, family.type)
        key, _, value = picked.partition("=")
        for sample in family.samples:
            if picked and sample.labels.get(key) != value:
                continue
            own = {label: text for label, text in sample.labels.items() if label != key}
            labels = {
                self._system.renamed_labels.get(label, label): text for label, text in own.items()
            }
            renamed.samples.append(
                Sample(
                    name + sample.name[len(family.name) :],
                    labels | self._system.labels,
                    sample.value,
                    sample.timestamp,
                    sample.exemplar,
                )
            )
        return renamed
