"""Resolves the settings of GPUs, and checks settings that only one kind of device supports."""

from __future__ import annotations

from collections.abc import Sequence

from weft.config.engine import GPU_ATTENTION_BACKENDS, EngineConfig
from weft.config.machine import GpuCard
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.quantized import CODES

CHUNK_LENS = (
    (60e9, 8192),
    (35e9, 4096),
)  # (memory, longest piece of a prompt in a step) of large GPUs
SMALL_CHUNK_LEN = 2048

KV_DTYPES_OF_ONE = {"int8": "cpu", "fp8": "cuda"}  # the only device whose kernels read it

FP8_CAPABILITY = (8, 9)

MAX_RUNNING = 256  # default maximum of requests that decode together
MOST_PLACES = 2**31 - 1  # maximal entries of the table of slots: indices are sent as int32
GRAPH_BYTES = 16_000_000  # bytes per captured step, besides the memory that all graphs share


def check_device(config: EngineConfig, device: str, gpus: Sequence[GpuCard] = ()) -> None:
    """Raise SettingsError for settings that the device does not support. The first of `gpus` is the
    one that would compute."""
    if config.quantize == "fp8" and device == "cpu":
        raise SettingsError(
            "--quantize fp8 needs --device cuda; the device is cpu, which takes int8 and int4"
        )
    wants_fp8 = [name for name in ("quantize", "kv_dtype") if getattr(config, name) == "fp8"]
    if wants_fp8 and device == "cuda" and not has_fp8(gpus[0]):
        option = wants_fp8[0].replace("_", "-")
        raise SettingsError(
            f"--{option} fp8 needs a GPU of compute capability 8.9 or higher; {gpus[0].name} has "
            f"{'.'.join(map(str, gpus[0].capability))}"
        )
    needed = KV_DTYPES_OF_ONE.get(config.kv_dtype, device)
    if needed != device:
        raise SettingsError(
            f"--kv-dtype {config.kv_dtype} needs --device {needed}; the device is {device}"
        )
    if config.kv_dtype == "fp8" and config.attention_backend == "torch":
        raise SettingsError("--kv-dtype fp8 needs --attention-backend triton; torch cannot read it")
    if device == "cpu" and config.attention_backend in GPU_ATTENTION_BACKENDS:
        name = config.attention_backend
        raise SettingsError(f"--attention-backend {name} needs --device cuda; the device is cpu")
    if device == "cpu" and config.cuda_graph_sizes:
        raise SettingsError("--cuda-graph-sizes needs --device cuda; the device is cpu")


def has_fp8(gpu: GpuCard) -> bool:
    """Whether a GPU computes with floats of eight bits; True if its capability is unknown."""
    return gpu.capability == (0, 0) or gpu.capability >= FP8_CAPABILITY


STORED = "stored"  # the value of `--quantize auto` if codes are kept


def quantize_by_default(model: ModelConfig, device: str, gpus: Sequence[GpuCard]) -> str:
    """The value of `--quantize auto`: the stored format, if the device computes with it, or
    "none"."""
    kept_as = model.stored.kept_as
    if kept_as == CODES:
        return STORED if device == "cpu" else "none"
    if kept_as == "fp8" and (device == "cpu" or not has_fp8(gpus[0])):
        return "none"
    return kept_as or "none"


def chunk_len(gpu: GpuCard) -> int:
    """Tokens of a prompt in one step: a fast GPU needs more tokens to be busy, and computes them
    sooner."""
    return next(
        (length for least, length in CHUNK_LENS if gpu.total_bytes >= least), SMALL_CHUNK_LEN
    )


def graph_sizes(config: EngineConfig) -> list[int]:
    """The numbers of requests for which decode steps are captured, rising. A step is padded to the
    next size, so small sizes are closer together: there, one more request costs a larger part of
    the step. Raises SettingsError.
    """
    if not config.cuda_graph or config.attention_backend == "torch":
        return []
    most = config.max_running_requests or MAX_RUNNING
    if not config.cuda_graph_sizes:
        steps = (
            1,
            2,
            4,
            *range(8, 64, 8),
            *range(64, 128, 16),
            *range(128, 512, 32),
            *range(512, most, 128),
        )
        return [*(size for size in steps if size < most), most]
    words = config.cuda_graph_sizes.split(",")
    if not all(word.strip().isdecimal() and 0 < int(word) <= most for word in words):
        raise SettingsError(
            f"--cuda-graph-sizes is {config.cuda_graph_sizes[:64]!r}; numbers from 1 to {most:,} "
            "(--max-running-requests) with commas between them are expected"
        )
    return sorted({int(word) for word in words})


def prompt_graph_sizes(config: EngineConfig) -> list[int]:
    """The numbers of tokens for which steps with prompts are captured, rising. Longer steps need no
    graph: a GPU computes them for longer than it takes to launch them.
    """
    if not config.cuda_graph or config.attention_backend == "torch":
        return []
    if not config.cuda_graph_prompt:
        return []
    most = config.cuda_graph_prompt
    return [*(size for size in (64, 128, 256, 512, 1024, 2048, 4096) if size < most), most]


def graph_bytes(config: EngineConfig) -> int:
    """Bytes of graphs and the table of slots, without activations. Raises SettingsError if the
    table is too large."""
    rows = (config.max_running_requests or MAX_RUNNING) + 1  # one row for the padding of steps
    if rows * config.context_length > MOST_PLACES:
        raise SettingsError(
            f"--max-running-requests {rows - 1:,} with --context-length "
            f"{config.context_length:,} are more than {MOST_PLACES:,} tokens together; lower one "
            "of them"
        )
    num_graphs = len(graph_sizes(config)) + len(prompt_graph_sizes(config))
    return rows * config.context_length * 4 + num_graphs * GRAPH_BYTES
