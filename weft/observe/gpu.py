"""The GPU on which the engine computes, as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.config.nvml import GpuState, Nvml
from weft.observe.engine_numbers import PREFIX

HELP = {
    "gpu_memory_used_bytes": "Memory of the GPU in use, by all processes.",
    "gpu_memory_total_bytes": "Memory of the GPU.",
    "gpu_utilization_ratio": "Part of the last second in which the GPU computed, 0 to 1.",
    "gpu_temperature_celsius": "Temperature of the GPU.",
    "gpu_power_watts": "Power that the GPU takes.",
}


class GpuNumbers(Collector):
    """What the driver tells of one GPU when metrics are asked for. A number that it does not tell
    is left out."""

    def __init__(self, nvml: Nvml, uuid: str) -> None:
        self._nvml = nvml
        self._uuid = uuid

    def collect(self) -> Iterator[Metric]:
        state = self._nvml.state(self._uuid)
        if state is None:
            return
        for name, value in _numbers(state).items():
            if value is not None:
                metric = GaugeMetricFamily(PREFIX + name, HELP[name], labels=["uuid"])
                metric.add_metric((self._uuid,), value)
                yield metric


def _numbers(state: GpuState) -> dict[str, float | None]:
    return {
        "gpu_memory_used_bytes": state.memory.used_bytes,
        "gpu_memory_total_bytes": state.memory.total_bytes,
        "gpu_utilization_ratio": state.busy,
        "gpu_temperature_celsius": state.temperature_c,
        "gpu_power_watts": state.power_w,
    }
