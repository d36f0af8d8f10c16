"""From "auto" to values: the only place where settings, model and machine meet.

The device's free memory is shared out in this order:

    |<------------------------------- free -------------------------------->|
    | weights | work (activations, logits, libraries) |   KV cache   | left |

The KV cache takes a share of what weights and work leave: 90 % on a GPU, which is ours alone; 50 % on a CPU, whose
memory others use too, and there no more than 4 GB unless a single context needs more. Nowhere does it take more than
`max_running_requests` whole contexts can fill. `--memory-fraction F` replaces the share: weights and KV cache take F of
what is free. `--kv-tokens N` replaces the whole rule. A context that was not asked for is cut to what fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.config.engine import EngineConfig
from weft.config.machine import Machine
from weft.config.model import ModelConfig
from weft.config.options import SettingsError

GB = 1_000_000_000

KV_SHARE = {"cpu": 0.5, "cuda": 0.9}
LARGEST_KV_SHARE = 0.9  # for a context that the user asked for
CPU_KV_BYTES = 4 * GB
MIN_RUNNING = 4
MAX_RUNNING = 256
TYPICAL_LEN = 512  # tokens of one request, to guess how many of them a KV cache will hold
MIN_CONTEXT = 512  # a context that is cut to fit does not become shorter

# While a piece of a prompt runs, everybody else waits for the next token; but the matrix products reach full speed only
# from some length on. On a CPU that is at about 256 rows, and 512 take 0.1 s (weft-nano) to 1.2 s (a 0.6 B).
CHUNK_LEN = {"cpu": 512, "cuda": 2048}

KV_DTYPES = {"auto": "", "bf16": "bfloat16", "fp32": "float32", "int8": "int8"}

LIBRARY_BYTES = {"cpu": 400_000_000, "cuda": 800_000_000}  # torch, its context and its own workspaces


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """Where the device's memory goes."""

    free_bytes: int
    weight_bytes: int
    work_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    page_size: int
    context_length: int
    note: str = ""  # what was cut to fit

    @property
    def kv_bytes(self) -> int:
        return self.kv_tokens * self.kv_bytes_per_token

    def __str__(self) -> str:
        whole = self.kv_tokens // self.context_length
        requests = f"{whole:,} request{'s' if whole != 1 else ''} of {self.context_length:,} tokens"
        return f"{size(self.kv_bytes)} = {self.kv_tokens:,} tokens (page {self.page_size}) · {requests}"


class Resolved(NamedTuple):
    config: EngineConfig  # with no "auto" left
    sizing: Sizing


def resolve(config: EngineConfig, model: ModelConfig, machine: Machine) -> Resolved:
    """The settings with every "auto" filled in for this model on this machine.

    Raises SettingsError for settings that contradict each other or the model, and for too little memory.
    """
    device = _device(config.device, machine)
    model = kept_as(config, replace(model, dtype=_dtype(config.dtype, model.dtype, device)))
    filled = replace(
        config,
        device=device,
        dtype=model.dtype,
        threads=config.threads or machine.cores,
        context_length=_context_length(config, model),
        chunked_prefill_size=_chunk_len(config, device),
    )
    free = machine.gpus[0].free_bytes if device == "cuda" else machine.free_bytes
    sizing = _sizing(config, filled, model, free)
    fitting = sizing.kv_tokens // min(sizing.context_length, TYPICAL_LEN)
    running = config.max_running_requests or max(MIN_RUNNING, min(MAX_RUNNING, fitting))
    filled = replace(
        filled,
        kv_tokens=sizing.kv_tokens,
        context_length=sizing.context_length,
        max_running_requests=running,
    )
    return Resolved(filled, sizing)


def kept_as(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """The model with the types that the settings choose for weights and KV."""
    return replace(
        model,
        dtype=model.dtype if config.dtype == "auto" else config.dtype,
        kv_dtype=KV_DTYPES[config.kv_dtype],
        quantize="" if config.quantize == "none" else config.quantize,
    )


def size(num_bytes: float) -> str:
    """Bytes for people: 16.4 GB, 512 MB, 4 kB."""
    if num_bytes >= GB:
        return f"{num_bytes / GB:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


def count(num_parameters: int) -> str:
    """Parameters for people: 0.6 B, 11.4 M."""
    return f"{num_parameters / 1e9:.1f} B" if num_parameters >= 5e8 else f"{num_parameters / 1e6:.1f} M"


def _device(asked: str, machine: Machine) -> str:
    if asked == "cuda" and not machine.gpus:
        raise SettingsError(f"--device is cuda, but no GPU can be used: {machine.no_gpu_reason}")
    if asked == "auto":
        return "cuda" if machine.gpus else "cpu"
    return asked


def _dtype(asked: str, stored: str, device: str) -> str:
    if asked != "auto":
        return asked
    if device == "cpu" and stored == "float16":
        return "bfloat16"  # products in float16 are 5 to 8 times slower here from a few rows on
    return stored


def _context_length(config: EngineConfig, model: ModelConfig) -> int:
    if config.context_length > model.max_position:
        raise SettingsError(
            f"--context-length is {config.context_length:,}, but {model.name} was made for at most "
            f"{model.max_position:,} positions (max_position_embeddings in its config.json)"
        )
    return config.context_length or model.max_position


def _chunk_len(config: EngineConfig, device: str) -> int:
    chunk = config.chunked_prefill_size or max(CHUNK_LEN[device], config.page_size)
    if 0 < chunk < config.page_size:
        raise SettingsError(
            f"--chunked-prefill-size is {chunk}, less than one page (--page-size is {config.page_size}); "
            "a prompt is cut between pages"
        )
    return chunk


def _sizing(asked: EngineConfig, config: EngineConfig, model: ModelConfig, free_bytes: int) -> Sizing:
    """Share out `free_bytes`. `config` is `asked` with device, dtype, context and chunk filled in."""
    weights = model.weights_bytes
    work = _work_bytes(config, model)
    per_token = model.kv_bytes_per_token
    if asked.kv_tokens:
        kv_tokens = _whole_pages(asked.kv_tokens, config)
    else:
        budget = _kv_budget(asked, config, per_token, weights, free_bytes - weights - work, free_bytes)
        kv_tokens = max(0, budget // per_token // config.page_size * config.page_size)

    context = min(config.context_length, kv_tokens)
    sizing = Sizing(
        free_bytes=free_bytes,
        weight_bytes=weights,
        work_bytes=work,
        kv_bytes_per_token=per_token,
        kv_tokens=kv_tokens,
        page_size=config.page_size,
        context_length=context,
        note=f"context cut from {config.context_length:,} to {context:,} tokens to fit the KV cache"
        if context < config.context_length
        else "",
    )
    _check_fit(asked, config, model, sizing)
    return sizing


def _work_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Memory for what lives during a step: activations of the longest piece of prompt, logits, and the libraries."""
    tokens = config.chunked_prefill_size if config.chunked_prefill_size > 0 else config.context_length
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    activations = tokens * (4 * model.hidden_size + 3 * model.intermediate_size + heads) * 4
    logits = 2 * (config.max_running_requests or MAX_RUNNING) * model.vocab_size * 4
    return activations + logits + LIBRARY_BYTES[config.device]


def _kv_budget(
    asked: EngineConfig, config: EngineConfig, per_token: int, weights: int, rest: int, free_bytes: int
) -> int:
    """Bytes for the KV cache when its size was not given. `rest` is what weights and work leave."""
    one_context = _whole_pages(config.context_length, config) * per_token
    useful = (config.max_running_requests or MAX_RUNNING) * one_context
    if asked.memory_fraction:
        return min(useful, rest, int(free_bytes * asked.memory_fraction) - weights)
    budget = min(useful, int(rest * KV_SHARE[config.device]))
    if config.device == "cpu":
        budget = min(budget, max(CPU_KV_BYTES, one_context))
    if asked.context_length:
        budget = max(budget, min(one_context, int(rest * LARGEST_KV_SHARE)))
    return budget


def _whole_pages(num_tokens: int, config: EngineConfig) -> int:
    return -(-num_tokens // config.page_size) * config.page_size


def _check_fit(asked: EngineConfig, config: EngineConfig, model: ModelConfig, sizing: Sizing) -> None:
    """Raise SettingsError if weights, work and the smallest useful KV cache are more than there is."""
    shortest = asked.context_length or min(config.context_length, MIN_CONTEXT)
    if asked.context_length and 0 < asked.kv_tokens < asked.context_length:
        raise SettingsError(
            f"--kv-tokens is {asked.kv_tokens:,}, less than --context-length ({asked.context_length:,}): "
            "a request of that length could never run"
        )
    room = sizing.free_bytes - sizing.weight_bytes - sizing.work_bytes
    fitting = max(0, room // sizing.kv_bytes_per_token // config.page_size * config.page_size)
    if sizing.kv_tokens <= fitting if asked.kv_tokens else sizing.kv_tokens >= shortest:
        return
    wanted = sizing.kv_tokens if asked.kv_tokens else shortest
    raise SettingsError(
        f"{model.name} does not fit into memory: weights take {size(sizing.weight_bytes)}, the work "
        f"{size(sizing.work_bytes)}, a KV cache of {wanted:,} tokens {size(wanted * sizing.kv_bytes_per_token)}, "
        f"and {size(sizing.free_bytes)} are free. {_cure(asked, config, sizing, fitting, shortest)}"
    )


def _cure(asked: EngineConfig, config: EngineConfig, sizing: Sizing, fitting: int, shortest: int) -> str:
    """The option that makes it fit. `fitting`: tokens there is room for; `shortest`: the least that is useful."""
    if fitting >= config.page_size:
        if asked.kv_tokens:
            return f"Lower --kv-tokens: {fitting:,} fit."
        if asked.memory_fraction and fitting >= shortest:
            enough = (sizing.weight_bytes + shortest * sizing.kv_bytes_per_token) / sizing.free_bytes
            return f"Raise --memory-fraction (now {asked.memory_fraction:g}): {enough + 0.01:.2f} is enough."
        if asked.context_length:
            return f"Lower --context-length: {int(fitting * LARGEST_KV_SHARE):,} fits."
    narrow = ", take --dtype bfloat16" if config.dtype == "float32" else ""
    return f"Free some memory{narrow} or take a smaller model."
