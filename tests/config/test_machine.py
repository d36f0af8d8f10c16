"""Cores and memory as control groups and the CPU topology limit them, on made-up file trees."""

from __future__ import annotations

from pathlib import Path

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


def test_share_of_time_of_a_group_above_limits_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: list(range(8)))
    quota = {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "350000 100000"}
    assert machine.usable_cores(tree(tmp_path, {**cpus(*[(0, i) for i in range(8)]), **V2, **quota})) == 3


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
