"""The numbers of a GPU, told by a stand-in for the management library."""

from __future__ import annotations

from typing import Any

import pytest

from weft.config import nvml
from weft.config.nvml import Nvml
from weft.observe.metrics import Metrics

UUID = "8d2c1f3a-0000-0000-0000-000000000001"
OTHER = "8d2c1f3a-0000-0000-0000-000000000002"


class FakeNvml:
    """libnvidia-ml.so.1 with one GPU. `is_instance`: an instance, which tells only its memory."""

    def __init__(self, is_instance: bool = False, error: int = 0) -> None:
        self._is_instance = is_instance
        self._error = error
        self.is_open = False

    def __call__(self, name: str) -> FakeNvml:
        assert name == "libnvidia-ml.so.1"
        return self

    def nvmlInit_v2(self) -> int:
        self.is_open = not self._error
        return self._error

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        kind = "MIG" if self._is_instance else "GPU"
        if name.decode() != f"{kind}-{UUID}":
            return 6
        handle._obj.value = 9
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        assert handle.value == 9
        memory._obj.total = 80
        memory._obj.free = 30
        memory._obj.used = 50
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, use: Any) -> int:
        use._obj.gpu = 75
        return 3 if self._is_instance else 0

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, value: Any) -> int:
        value._obj.value = 61
        return 3 if self._is_instance else 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, value: Any) -> int:
        value._obj.value = 412_500
        return 3 if self._is_instance else 0


def page(monkeypatch: pytest.MonkeyPatch, library: FakeNvml, uuid: str = UUID) -> str:
    metrics = Metrics("model")
    with monkeypatch.context() as patched:
        patched.setattr(nvml.Nvml.open.__func__, "__defaults__", (library,))  # type: ignore[attr-defined]
        metrics.watch_gpu(uuid)
    return metrics.render().decode()


def test_a_gpu_tells_its_memory_use_temperature_and_power(monkeypatch: pytest.MonkeyPatch) -> None:
    text = page(monkeypatch, FakeNvml())
    for line in (
        f'weft:gpu_memory_used_bytes{{uuid="{UUID}"}} 50.0',
        f'weft:gpu_memory_total_bytes{{uuid="{UUID}"}} 80.0',
        f'weft:gpu_utilization_ratio{{uuid="{UUID}"}} 0.75',
        f'weft:gpu_temperature_celsius{{uuid="{UUID}"}} 61.0',
        f'weft:gpu_power_watts{{uuid="{UUID}"}} 412.5',
    ):
        assert line in text.splitlines()


def test_what_an_instance_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    text = page(monkeypatch, FakeNvml(is_instance=True))
    assert "gpu_memory_used_bytes" in text
    assert "utilization" not in text
    assert "celsius" not in text
    assert "watts" not in text


def test_without_the_library_or_the_gpu_there_are_no_such_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    assert Nvml.open(missing) is None
    assert Nvml.open(FakeNvml(error=9)) is None
    assert "gpu_memory" not in page(monkeypatch, FakeNvml(error=9))
    assert "gpu_memory" not in page(monkeypatch, FakeNvml(), OTHER)


def test_the_library_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    opened = Nvml.open(library)
    assert opened is not None
    assert library.is_open
    opened.close()
    assert not library.is_open
