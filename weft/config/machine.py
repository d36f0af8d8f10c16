"""What this machine has to give: cores, memory, GPUs. Looks at the operating system, control groups and the NVIDIA
driver; imports neither torch nor numpy, so that it costs milliseconds and can run before anything is loaded.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class Gpu:
    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Machine:
    cores: int  # physical cores that this process may use
    free_bytes: int  # memory that can be taken without swapping and without reaching a limit
    total_bytes: int
    gpus: tuple[Gpu, ...] = ()  # that torch can use
    no_gpu_reason: str = ""


def probe() -> Machine:
    """This machine as it is now."""
    import psutil

    memory = psutil.virtual_memory()
    limits = list(memory_limits())
    gpus, reason = _gpus()
    return Machine(
        cores=usable_cores(),
        free_bytes=min([memory.available, *(free for free, _ in limits)]),
        total_bytes=min([memory.total, *(limit for _, limit in limits)]),
        gpus=gpus,
        no_gpu_reason=reason,
    )


def usable_cores(root: Path = ROOT) -> int:
    """Physical cores among the CPUs that the scheduler gives us, and no more than the control group's share of time."""
    allowed = _allowed_cpus()
    topology = root / "sys/devices/system/cpu"
    cores = set()
    for cpu in allowed:
        folder = topology / f"cpu{cpu}" / "topology"
        package, core = _read(folder / "physical_package_id"), _read(folder / "core_id")
        cores.add((package, core) if core else ("", str(cpu)))
    return max(1, min([len(cores), *(int(share) for share in cpu_shares(root))]))


def _allowed_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_shares(root: Path = ROOT) -> Iterator[float]:
    """The limits of CPU time that our control groups set, in CPUs."""
    for folder in _control_groups(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")  # version 2: "150000 100000", or "max 100000"
        quota = quota or _read(folder / "cpu.cfs_quota_us")  # version 1: -1 is no limit
        period = period or _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def memory_limits(root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """(free, limit) in bytes of each control group that limits our memory. File cache counts as free: it gives way."""
    for folder in _control_groups(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if not (limit.isdigit() and used.isdigit()) or int(limit) >= 1 << 60:  # version 1 says "none" by a huge number
            continue
        stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
        cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        yield max(0, int(limit) - max(0, int(used) - cache)), int(limit)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Our control group's folder and those above it, for version 2, or for `controller` in version 1."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = mount / controller if names else mount
        folder = top / path.lstrip("/")
        if ".." in folder.parts or not folder.is_dir():  # the path is that of another namespace
            folder = top
        while folder != mount.parent and folder.is_relative_to(top):
            yield folder
            folder = folder.parent


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that torch can use, or none and the reason. Asks the driver without opening a context."""
    try:
        build = version("torch")
    except PackageNotFoundError:
        return (), "torch is not installed"
    if build.endswith("+cpu"):
        return (), f"torch {build} is a build without CUDA"
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return (), "there is no NVIDIA driver"
    if nvml.nvmlInit_v2():
        return (), "the NVIDIA driver does not answer"
    try:
        found = [_gpu(nvml, index) for index in _visible(nvml)]
    finally:
        nvml.nvmlShutdown()
    return tuple(found), "" if found else "the NVIDIA driver shows no GPU"


def _visible(nvml: ctypes.CDLL) -> list[int]:
    """Indices of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order (all of them if it names no numbers)."""
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or not all(word.strip().isdigit() for word in wanted.split(",") if word):
        return list(range(count.value))
    return [int(word) for word in wanted.split(",") if word and int(word) < count.value]


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    handle, memory, name = ctypes.c_void_p(), _NvmlMemory(), ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    nvml.nvmlDeviceGetName(handle, name, len(name))
    return Gpu(name.value.decode(errors="replace"), int(memory.free), int(memory.total))
