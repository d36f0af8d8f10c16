"""Cores and memory as control groups and the CPU topology limit them, on made-up file trees."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from weft.config import machine


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def cpus(*cores: tuple[int, int]) -> dict[str, str]:
    """Topology files: cores[i] is the (package, core) of CPU i."""
    files = {}
    for cpu, (package, core) in enumerate(cores):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = str(package)
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_id"] = str(core)
    return files


V2 = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/x": ""}


def test_hyperthreads_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: [0, 1, 2, 3])
    root = tree(tmp_path, cpus((0, 0), (0, 1), (0, 0), (0, 1)))
    assert machine.usable_cores(root) == 2


def test_only_cpus_that_we_may_use_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: [1])
    assert machine.usable_cores(tree(tmp_path, cpus((0, 0), (0, 1), (1, 0)))) == 1


def test_share_of_time_of_a_group_above_limits_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: list(range(8)))
    quota = {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "350000 100000"}
    assert (
        machine.usable_cores(tree(tmp_path, {**cpus(*[(0, i) for i in range(8)]), **V2, **quota}))
        == 3
    )


def test_less_than_one_cpu_is_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: [0, 1])
    quota = {"sys/fs/cgroup/a/b/cpu.max": "50000 100000"}
    assert machine.usable_cores(tree(tmp_path, {**V2, **quota})) == 1


def test_file_cache_counts_as_free_memory(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/b/memory.max": "1000",
        "sys/fs/cgroup/a/b/memory.current": "900",
        "sys/fs/cgroup/a/b/memory.stat": "anon 500\ninactive_file 300\nactive_file 100\n",
        "sys/fs/cgroup/a/memory.max": "max",
        "sys/fs/cgroup/a/memory.current": "900",
    }
    assert list(machine.memory_limits(tree(tmp_path, {**V2, **files}))) == [(500, 1000)]


def test_first_version_of_control_groups(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/job\n1:name=systemd:/\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2000",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "500",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "500",
    }
    assert list(machine.memory_limits(tree(tmp_path, files))) == [(1500, 2000)]


def test_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert list(machine.memory_limits(tmp_path)) == []
    assert list(machine.cpu_shares(tmp_path)) == []


def test_probe_finds_this_machine() -> None:
    found = machine.probe()
    assert 0 < found.free_bytes <= found.total_bytes
    assert found.cores >= 1
    assert bool(found.gpus) != bool(found.no_gpu_reason)


# GPUs

HOPPER = UUID(int=7)
INSTANCE = UUID(int=9)


class FakeCuda:
    """libcuda.so.1 and libnvidia-ml.so.1 of a machine with the GPUs that the driver shows."""

    def __init__(
        self,
        *uuids: UUID,
        error: int = 0,
        version: int = 13_000,
        free: dict[str, int] | None = None,
    ) -> None:
        self._uuids = uuids
        self._error = error
        self._version = version
        self._free = free  # by name; None: there is no management library

    def load(self, name: str) -> Any:
        if name == "libnvidia-ml.so.1" and self._free is None:
            raise OSError
        return self

    def cuInit(self, flags: int) -> int:
        return self._error

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self._version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._uuids)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 40 + index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = f"card {device.value - 40}".encode()
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: Any) -> int:
        total._obj.value = 10**11
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, device: Any) -> int:
        ctypes.memmove(uuid._obj, self._uuids[device.value - 40].bytes, 16)
        return 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        names = list(self._free or {})
        if name.decode() not in names:
            return 6
        handle._obj.value = names.index(name.decode()) + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.free = list((self._free or {}).values())[handle.value - 1]
        return 0


def gpus(fake: FakeCuda, tmp_path: Path, cuda: str = "'13.0'") -> machine.Found:
    text = f"from typing import Optional\n__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\n"
    (tmp_path / "version.py").write_text(text)
    return machine._gpus(fake.load, tmp_path)


def test_gpus_are_those_that_the_driver_shows_in_its_order_with_their_own_free_memory(
    tmp_path: Path,
) -> None:
    free = {f"GPU-{UUID(int=3)}": 1, f"GPU-{HOPPER}": 2, f"MIG-{INSTANCE}": 3}
    found = gpus(FakeCuda(HOPPER, INSTANCE, free=free), tmp_path).gpus
    assert [gpu.free_bytes for gpu in found] == [2, 3]
    assert found[0] == machine.GpuCard("card 0", 2, 10**11, (9, 0), str(HOPPER))


def test_without_the_management_library_all_memory_counts_as_free(tmp_path: Path) -> None:
    assert gpus(FakeCuda(HOPPER), tmp_path).gpus[0].free_bytes == 10**11
    assert gpus(FakeCuda(HOPPER, free={}), tmp_path).gpus[0].free_bytes == 10**11


@pytest.mark.parametrize(
    ("fake", "reason", "is_fault"),
    [
        (FakeCuda(error=100), "the NVIDIA driver shows no GPU", False),
        (FakeCuda(), "the NVIDIA driver shows no GPU", False),
        (FakeCuda(error=802), "the NVIDIA driver does not answer (cuInit gives error 802)", True),
        (
            FakeCuda(HOPPER, version=12_080),
            "the NVIDIA driver is for CUDA 12.8, torch 2.11.0 needs one for 13.0: update the driver",
            True,
        ),
    ],
)
def test_gpus_that_cannot_be_used_are_not_there_and_the_reason_is(
    fake: FakeCuda, reason: str, is_fault: bool, tmp_path: Path
) -> None:
    assert gpus(fake, tmp_path) == ((), reason, is_fault)


def test_a_torch_for_cpus_has_no_gpu_whatever_its_version_is_called(tmp_path: Path) -> None:
    assert gpus(FakeCuda(HOPPER), tmp_path, "None").reason == "torch 2.11.0 is a build without CUDA"
