"""Which models and GPUs `--attention-backend fa3` and `flashinfer` are refused for, each in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.config.test_resolve import MODEL as TINY
from tests.config.test_resolve import machine, refusal
from weft.config.engine import EngineConfig
from weft.config.gpu import flashinfer_bytes, prompt_graph_sizes
from weft.config.machine import GpuCard
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.resolve import GB, Resolved, resolve

MODEL = replace(TINY, head_dim=64)
HOPPER, AMPERE, UNKNOWN = (9, 0), (8, 0), (0, 0)


def resolved(
    backend: str,
    capability: tuple[int, int] = HOPPER,
    model: ModelConfig = MODEL,
    **settings: object,
) -> Resolved:
    gpu = GpuCard("card", 141 * GB, 141 * GB, capability)
    return resolve(
        EngineConfig(attention_backend=backend, **settings), model, machine(1, gpus=(gpu,))
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["fa3", "flashinfer"])
def test_pages_of_any_size_and_windows_are_taken(backend: str) -> None:
    for model in (MODEL, replace(MODEL, sliding_window=64)):
        for capability in (HOPPER, UNKNOWN):
            config = resolved(backend, capability, model, page_size=7, kv_dtype="auto").config
            assert (config.attention_backend, config.page_size) == (backend, 7)


@pytest.mark.parametrize(
    ("backend", "changes", "settings", "capability", "says"),
    [
        ("fa3", {}, {}, AMPERE, "fa3 needs a GPU of compute capability 9.0; card has 8.0"),
        ("fa3", {}, {}, (10, 0), "fa3 needs a GPU of compute capability 9.0; card has 10.0"),
        (
            "flashinfer",
            {},
            {},
            (7, 5),
            "flashinfer needs a GPU of compute capability 8.0 or higher; card has 7.5",
        ),
        ("fa3", {"head_dim": 68}, {}, HOPPER, "fa3 takes heads of 8, 16, ... 256; .* has 68"),
        (
            "flashinfer",
            {"head_dim": 96},
            {},
            HOPPER,
            "flashinfer takes heads of 64, 128 or 256; .* has 96",
        ),
        (
            "fa3",
            {},
            {"dtype": "float32"},
            HOPPER,
            "fa3 computes in float16 or bfloat16 .* --dtype is float32",
        ),
        ("flashinfer", {}, {"kv_dtype": "fp32"}, HOPPER, "--dtype is bfloat16, KV in float32"),
        (
            "fa3",
            {},
            {"kv_dtype": "fp8"},
            HOPPER,
            "--kv-dtype fp8 needs --attention-backend triton; fa3 cannot",
        ),
        ("flashinfer", {}, {"kv_dtype": "int8"}, HOPPER, "--kv-dtype int8 needs --device cpu"),
    ],
)
def test_what_a_provider_does_not_compute_is_refused(
    backend: str,
    changes: dict[str, int],
    settings: dict[str, object],
    capability: tuple[int, int],
    says: str,
) -> None:
    with pytest.raises(SettingsError, match=says) as raised:
        resolved(backend, capability, replace(MODEL, **changes), **settings)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("backend", ["fa3", "flashinfer"])
def test_a_provider_needs_a_gpu(backend: str) -> None:
    says = refusal(attention_backend=backend)
    assert says == f"--attention-backend {backend} needs --device cuda; the device is cpu"


def test_flashinfer_has_its_memory_counted_and_no_graphs_of_prompts() -> None:
    sizing, other = (
        resolved(name, context_length=4096, max_running_requests=8, cuda_graph_prompt=0).sizing
        for name in ("flashinfer", "triton")
    )
    assert sizing.work_bytes - other.work_bytes == flashinfer_bytes(MODEL) + 9 * 4096 * 4
    assert (
        flashinfer_bytes(replace(MODEL, num_heads=32, num_kv_heads=1))
        > 32 * 132 * 2 * 128 * 128 * 4
    )
    assert prompt_graph_sizes(EngineConfig(attention_backend="flashinfer")) == []
    assert prompt_graph_sizes(EngineConfig(attention_backend="fa3"))
