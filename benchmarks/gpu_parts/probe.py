"""What machine this is, and its limits: what everything else is to be compared with."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from importlib import metadata

import torch

from gpu_parts.part import Row, Setting
from gpu_parts.timing import seconds
from weft.config.machine import probe
from weft.version import __version__


def findings(setting: Setting) -> Iterator[Row]:
    machine = probe()
    yield {
        "what": "versions",
        "weft": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    yield {"what": "machine", "cores": machine.cores, "memory_gb": machine.total_bytes / 1e9}
    if setting.on_gpu:
        yield from gpu()
    yield from memory(setting)
    yield from product(setting)
    yield from launches(setting)


def gpu() -> Iterator[Row]:
    found = torch.cuda.get_device_properties(0)
    yield {
        "what": found.name,
        "memory_gb": found.total_memory / 1e9,
        "processors": found.multi_processor_count,
        "capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
        "triton": metadata.version("triton"),
    }


def memory(setting: Setting) -> Iterator[Row]:
    size = setting.pick(1 << 30, 1 << 24)
    source = torch.ones(size, dtype=torch.int8, device=setting.device)
    target = torch.empty_like(source)
    taken = seconds(lambda: target.copy_(source), setting.device)
    yield {"what": "copy on the device", "tb_per_s": 2 * size / taken / 1e12}
    if not setting.on_gpu:
        return
    for num_bytes in (10_240, 1 << 26):
        pinned = torch.empty(num_bytes, dtype=torch.int8, pin_memory=True)
        there = torch.empty(num_bytes, dtype=torch.int8, device="cuda")
        up = seconds(lambda: there.copy_(pinned, non_blocking=True), "cuda")  # noqa: B023
        down = seconds(lambda: pinned.copy_(there, non_blocking=True), "cuda")  # noqa: B023
        yield {
            "what": f"copy of {num_bytes:,} bytes from and to the host",
            "up_us": up * 1e6,
            "down_us": down * 1e6,
        }


def product(setting: Setting) -> Iterator[Row]:
    for rows in setting.pick((8192, 256, 64, 1), (64, 1)):
        inner = setting.pick(8192, 256)
        x = torch.randn(rows, inner, dtype=torch.bfloat16, device=setting.device)
        weight = torch.randn(inner, inner, dtype=torch.bfloat16, device=setting.device)
        taken = seconds(lambda: torch.nn.functional.linear(x, weight), setting.device)  # noqa: B023
        flops, read = 2 * rows * inner * inner, 2 * inner * inner
        yield {
            "what": f"product of {rows} rows",
            "tflops": flops / taken / 1e12,
            "tb_per_s": read / taken / 1e12,
        }


def launches(setting: Setting) -> Iterator[Row]:
    """What the host pays for each kernel that torch launches."""
    x = torch.zeros(1, device=setting.device)
    num = setting.pick(2_000, 200)
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(num):
            x.add_(1)
        taken = time.perf_counter() - began
        if setting.on_gpu:
            torch.cuda.synchronize()
    yield {"what": "a launch by torch", "us": taken / num * 1e6}
