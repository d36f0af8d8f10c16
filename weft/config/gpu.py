"""What settings become on a GPU, and which of them are for one kind of device only."""

from __future__ import annotations

from collections.abc import Sequence

from weft.config.engine import EngineConfig
from weft.config.machine import GpuCard
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.quantized import CODES

CHUNK_LENS = (
    (60e9, 8192),
    (35e9, 4096),
)  # (memory, longest piece of a prompt in a step) of large GPUs
SMALL_CHUNK_LEN = 2048

KV_DTYPES_OF_ONE = {"int8": "cpu", "fp8": "cuda"}  # the device whose kernels alone read it

FP8_CAPABILITY = (8, 9)

MAX_RUNNING = 256  # requests that decode together, if nothing else is asked for
MOST_PLACES = 2**31 - 1  # in the table of slots: they travel as int32
GRAPH_BYTES = 16_000_000  # of one captured step, besides the memory that all of them share


def check_device(config: EngineConfig, device: str, gpus: Sequence[GpuCard] = ()) -> None:
    """Raise SettingsError for what the device does not have.
    The first of `gpus` is the one that would compute.
    """
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
    if device == "cpu" and config.attention_backend not in ("auto", "torch"):
        name = config.attention_backend
        raise SettingsError(f"--attention-backend {name} needs --device cuda; the device is cpu")
    if device == "cpu" and config.cuda_graph_sizes:
        raise SettingsError("--cuda-graph-sizes needs --device cuda; the device is cpu")


def has_fp8(gpu: GpuCard) -> bool:
    """Whether it computes with floats of eight bits; one of unknown capability is trusted to."""
    return gpu.capability == (0, 0) or gpu.capability >= FP8_CAPABILITY


STORED = "stored"  # what `--quantize auto` becomes where codes are kept


def quantize_by_default(model: ModelConfig, device: str, gpus: Sequence[GpuCard]) -> str:
    """What `--quantize auto` is: what the weights are stored in, if the device computes with it."""
    kept_as = model.stored.kept_as
    if kept_as == CODES:
        return STORED if device == "cpu" else "none"
    if kept_as == "fp8" and (device == "cpu" or not has_fp8(gpus[0])):
        return "none"
    return kept_as or "none"


def chunk_len(gpu: GpuCard) -> int:
    """Tokens of a prompt in one step: a fast GPU needs more of them to be busy,
    and is through with them sooner.
    """
    return next(
        (length for least, length in CHUNK_LENS if gpu.total_bytes >= least), SMALL_CHUNK_LEN
    )


def graph_sizes(config: EngineConfig) -> list[int]:
    """For how many requests decode steps are captured, rising. A step is filled up to the next
    size, so sizes lie closer where one more request costs a larger part of the step.
    Raises SettingsError.
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
    """For how many tokens steps with prompts are captured, rising. Longer steps keep a GPU busy for
    longer than it takes to launch them.
    """
    if not config.cuda_graph or config.attention_backend == "torch":
        return []
    if not config.cuda_graph_prompt:
        return []
    most = config.cuda_graph_prompt
    return [*(size for size in (64, 128, 256, 512, 1024, 2048, 4096) if size < most), most]


def graph_bytes(config: EngineConfig) -> int:
    """What graphs and the table of slots take, besides activations.
    Raises SettingsError for a table too large.
    """
    rows = (config.max_running_requests or MAX_RUNNING) + 1  # one for steps that are filled up
    if rows * config.context_length > MOST_PLACES:
        raise SettingsError(
            f"--max-running-requests {rows - 1:,} with --context-length "
            f"{config.context_length:,} are more than {MOST_PLACES:,} tokens together; lower one "
            "of them"
        )
    num_graphs = len(graph_sizes(config)) + len(prompt_graph_sizes(config))
    return rows * config.context_length * 4 + num_graphs * GRAPH_BYTES
