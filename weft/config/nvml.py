"""Memory, use, temperature and power of NVIDIA GPUs, from the management library of the driver
(NVML). It opens no context on a GPU, and imports no torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

LIBRARY = "libnvidia-ml.so.1"
KINDS = ("GPU", "MIG")  # beginnings of the names of GPUs, and of instances on them
CORE_SENSOR = 0  # NVML_TEMPERATURE_GPU

Load = Callable[[str], Any]


class GpuMemory(NamedTuple):
    total_bytes: int
    free_bytes: int
    used_bytes: int


class GpuState(NamedTuple):
    """What a GPU does now. None: this GPU does not tell it; an instance (MIG) tells only memory."""

    memory: GpuMemory
    busy: float | None  # part of the last second in which some kernel ran, 0 to 1
    temperature_c: float | None
    power_w: float | None


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class _Use(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Nvml:
    """The library, initialised. To be closed."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def open(cls, load: Load = ctypes.CDLL) -> Nvml | None:
        """None if there is no such library, or it does not answer."""
        try:
            library = load(LIBRARY)
        except OSError:
            return None
        return None if library.nvmlInit_v2() else cls(library)

    def close(self) -> None:
        self._library.nvmlShutdown()

    def memory(self, uuid: str) -> GpuMemory | None:
        """Of the GPU, or of the instance, with this UUID; None if it is not found."""
        handle = self._find(uuid)
        return None if handle is None else self._memory(handle)

    def state(self, uuid: str) -> GpuState | None:
        """Of the GPU, or of the instance, with this UUID; None if it is not found."""
        handle = self._find(uuid)
        if handle is None:
            return None
        memory = self._memory(handle)
        if memory is None:
            return None
        use = _Use()
        temperature = ctypes.c_uint()
        power = ctypes.c_uint()  # in milliwatts
        library = self._library
        has_use = not library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use))
        has_temperature = not library.nvmlDeviceGetTemperature(
            handle, CORE_SENSOR, ctypes.byref(temperature)
        )
        has_power = not library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power))
        return GpuState(
            memory=memory,
            busy=use.gpu / 100 if has_use else None,
            temperature_c=float(temperature.value) if has_temperature else None,
            power_w=power.value / 1_000 if has_power else None,
        )

    def _find(self, uuid: str) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        for kind in KINDS:
            name = f"{kind}-{uuid}".encode()
            if not self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
                return handle
        return None

    def _memory(self, handle: ctypes.c_void_p) -> GpuMemory | None:
        found = _Memory()
        if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found)):
            return None
        return GpuMemory(int(found.total), int(found.free), int(found.used))
