"""Finds the cores, the memory and the GPUs that this process can use. It asks the operating system,
control groups and the NVIDIA driver, and imports neither torch nor numpy: it takes milliseconds,
and runs before anything is loaded.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from weft.config.nvml import Nvml

ROOT = Path("/")


@dataclass(frozen=True)
class GpuCard:
    name: str
    free_bytes: int
    total_bytes: int
    capability: tuple[int, int] = (0, 0)  # compute capability, (9, 0) for Hopper; (0, 0): unknown
    uuid: str = ""  # without its kind, of a GPU or an instance (MIG)


@dataclass(frozen=True)
class Machine:
    cores: int  # physical cores that this process may use
    free_bytes: int  # memory that can be taken without swapping and without reaching a limit
    total_bytes: int
    gpus: tuple[GpuCard, ...] = ()  # GPUs that torch can use
    no_gpu_reason: str = ""
    has_gpu_fault: bool = False  # the user can correct that reason
    has_kernels: bool = True  # weft's kernels exist for the processor; True until checked


def probe() -> Machine:
    """The resources of this machine now."""
    import psutil

    memory = psutil.virtual_memory()
    limits = list(memory_limits())
    gpus, reason, is_fault = _gpus()
    return Machine(
        cores=usable_cores(),
        free_bytes=min([memory.available, *(free for free, _ in limits)]),
        total_bytes=min([memory.total, *(limit for _, limit in limits)]),
        gpus=gpus,
        no_gpu_reason=reason,
        has_gpu_fault=is_fault,
    )


def usable_cores(root: Path = ROOT) -> int:
    """Number of physical cores among the CPUs that this process may use, limited to the control
    group's share of CPU time."""
    allowed = _allowed_cpus()
    topology = root / "sys/devices/system/cpu"
    cores = set()
    for cpu in allowed:
        folder = topology / f"cpu{cpu}" / "topology"
        package = _read(folder / "physical_package_id")
        core = _read(folder / "core_id")
        if core:
            cores.add((package, core))
        else:
            cores.add(("", str(cpu)))
    return max(1, min([len(cores), *(int(share) for share in cpu_shares(root))]))


def _allowed_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_shares(root: Path = ROOT) -> Iterator[float]:
    """The limits of CPU time that this process's control groups set, in CPUs."""
    for folder in _control_groups(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(
            " "
        )  # version 2: "150000 100000", or "max 100000"
        quota = quota or _read(folder / "cpu.cfs_quota_us")  # version 1: -1 is no limit
        period = period or _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def memory_limits(root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """(free, limit) in bytes of each control group that limits this process's memory. File cache
    counts as free, because the kernel can drop it.
    """
    for folder in _control_groups(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if (
            not (limit.isdigit() and used.isdigit()) or int(limit) >= 1 << 60
        ):  # version 1 writes a huge number for no limit
            continue
        stat = dict(
            line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line
        )
        cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        yield max(0, int(limit) - max(0, int(used) - cache)), int(limit)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of the groups above it, for version 2, or for
    `controller` in version 1.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = mount
        if names:
            top = mount / controller
        folder = top / path.lstrip("/")
        if ".." in folder.parts or not folder.is_dir():  # the path belongs to another namespace
            folder = top
        while folder != mount.parent and folder.is_relative_to(top):
            yield folder
            folder = folder.parent


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


NO_DEVICE = 100  # error of cuInit if CUDA_VISIBLE_DEVICES leaves no GPU
CAPABILITY = (75, 76)  # attributes of a device: compute capability, major and minor


class Found(NamedTuple):
    gpus: tuple[GpuCard, ...]
    reason: str = ""  # why there is no GPU
    is_fault: bool = False


def _gpus(load: Callable[[str], Any] = ctypes.CDLL, torch_folder: Path | None = None) -> Found:
    """The GPUs that torch can use, or none and the reason. The driver itself applies
    CUDA_VISIBLE_DEVICES (numbers, UUIDs or MIG instances), and lists GPUs in the order of torch's
    numbers; no context is opened.
    """
    build, wanted = _torch_build(torch_folder)
    if not wanted:
        if build:
            return Found((), f"torch {build} is a build without CUDA")
        return Found((), "torch is not installed")
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return Found((), "there is no NVIDIA driver")
    error = cuda.cuInit(0)
    if error not in (0, NO_DEVICE):
        return Found(
            (), f"the NVIDIA driver does not answer (cuInit gives error {error})", is_fault=True
        )
    version = ctypes.c_int()
    count = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    if version.value // 1000 < int(wanted.partition(".")[0]):
        theirs = f"{version.value // 1000}.{version.value % 1000 // 10}"
        reason = (
            f"the NVIDIA driver is for CUDA {theirs}, torch {build} needs one for {wanted}: update "
            "the driver"
        )
        return Found((), reason, is_fault=True)
    if not error:
        cuda.cuDeviceGetCount(ctypes.byref(count))
    found = tuple(_gpu(cuda, index, load) for index in range(count.value))
    if not found:
        return Found((), "the NVIDIA driver shows no GPU")
    return Found(found, "")


def _torch_build(folder: Path | None = None) -> tuple[str, str]:
    """The version of torch, and the version of CUDA that it is built for; "" for a missing one.
    Read from a file of torch, because importing torch takes a second.
    """
    if folder is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return "", ""
        folder = Path(spec.origin).parent
    text = _read(folder / "version.py")
    names = (r"__version__", r"cuda(?:: Optional\[str\])?")
    found = [re.search(rf"^{name} = '([^']+)'", text, re.MULTILINE) for name in names]
    version, cuda = (match[1] if match else "" for match in found)
    return version, cuda


def _gpu(cuda: Any, index: int, load: Callable[[str], Any]) -> GpuCard:
    device = ctypes.c_int()
    total = ctypes.c_size_t()
    name = ctypes.create_string_buffer(96)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    capability = [ctypes.c_int() for _ in CAPABILITY]
    for value, attribute in zip(capability, CAPABILITY, strict=True):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    uuid = (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGetUuid_v2(ctypes.byref(uuid), device)
    known_as = str(UUID(bytes=bytes(uuid)))
    free = _free_bytes(known_as, load)
    major, minor = capability
    text = name.value.decode(errors="replace")
    return GpuCard(
        name=text,
        free_bytes=total.value if free is None else free,
        total_bytes=total.value,
        capability=(major.value, minor.value),
        uuid=known_as,
    )


def _free_bytes(uuid: str, load: Callable[[str], Any]) -> int | None:
    """Free memory of a GPU or a MIG instance; None if the driver does not tell it."""
    nvml = Nvml.open(load)
    if nvml is None:
        return None
    try:
        memory = nvml.memory(uuid)
    finally:
        nvml.close()
    return None if memory is None else memory.free_bytes
