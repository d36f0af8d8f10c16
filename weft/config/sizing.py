"""How the memory of a device is divided.

    |<------------------------------- free -------------------------------->|
    | weights | work (activations, logits, libraries) |   KV cache   | left |

The KV cache takes a share of the memory that weights and work leave: 90 % on a GPU, which only weft
uses; 50 % on a CPU, whose memory other processes also use, and there at most 4 GB unless a single
context needs more. It never takes more than `max_running_requests` whole contexts can fill.
`--memory-fraction F` replaces the share: weights and KV cache take F of the free memory.
`--kv-tokens N` replaces the whole rule. A context length that the user did not set is cut to fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.adapters import adapters_bytes
from weft.config.amounts import GB, size
from weft.config.cache import stores_kv
from weft.config.drafts import OFF
from weft.config.engine import EngineConfig
from weft.config.gpu import MAX_RUNNING, graph_bytes, graph_sizes, prompt_graph_sizes
from weft.config.lockstep import elsewhere_bytes
from weft.config.model import ModelConfig
from weft.config.numbers import counted
from weft.config.options import SettingsError, TooLarge
from weft.config.parallel import num_ranks
from weft.config.states import with_states
from weft.config.windows import KvPools, one_pool, two_pools, with_draft

KV_SHARE = {"cpu": 0.5, "cuda": 0.9}
LARGEST_KV_SHARE = 0.9  # for a context length that the user set
CPU_KV_BYTES = 4 * GB
HEARD_SHARE = 0.25  # of free memory, for what requests attend to of an encoder
MAX_HEARD = 32  # requests that have it, unless the user wants more
MIN_CONTEXT = 512  # minimum length of a context that is cut to fit
LIBRARY_BYTES = {
    "cpu": 400_000_000,
    "cuda": 800_000_000,
}  # torch, its context and its own workspaces


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The use of the device's memory."""

    free_bytes: int
    weight_bytes: int
    work_bytes: int
    kv_tokens: int
    pools: KvPools
    context_length: int
    note: str = ""  # what was cut to fit, as a text

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token in all layers."""
        return self.pools.bytes_per_token + self.pools.window_bytes

    @property
    def kv_bytes(self) -> int:
        return self.pools.num_bytes(self.kv_tokens)

    @property
    def window_tokens(self) -> int:
        """Tokens in the pool of layers with windows; 0 without such a pool."""
        return self.pools.window_tokens(self.kv_tokens)

    @property
    def state_slots(self) -> int:
        """Number of kept states; 0 if no layer keeps a state."""
        return self.pools.state_slots(self.kv_tokens)

    def __str__(self) -> str:
        if not self.kv_bytes:
            return f"none: prompts of up to {self.context_length:,} tokens are computed whole"
        num_contexts = self.kv_tokens // self.context_length
        requests = f"{counted(num_contexts, 'request')} of {self.context_length:,} tokens"
        windows = ""
        if self.window_tokens:
            windows = (
                f", {self.window_tokens:,} of them in layers with windows of "
                f"{self.pools.window:,} tokens"
            )
        states = ""
        if self.pools.states is not None:
            of_one = size(self.pools.states.bytes_per_slot)
            states = f" and {self.state_slots:,} states of {of_one}"
        return (
            f"{size(self.kv_bytes)} = {self.kv_tokens:,} tokens{windows}{states} "
            f"(page {self.pools.page_size}) · {requests}"
        )


def sizing_of(
    asked: EngineConfig,
    config: EngineConfig,
    model: ModelConfig,
    free_bytes: int,
    draft: ModelConfig | None,
    head_copy: int,
) -> Sizing:
    """Divide `free_bytes`. `config` is `asked` with device, dtype, context and chunk filled in;
    `head_copy`: bytes of the copy of the head.
    Raises SettingsError if memory is too small."""
    weights = model.weights_bytes - elsewhere_bytes(config, model)
    work = num_ranks(config) * work_bytes(config, model) + adapters_bytes(config, model)
    work += head_copy + heard_rows(config, model, free_bytes) * model.heard_bytes
    pools = _with_states(_pools(asked, config, model), config, model)
    if draft is not None:
        weights += draft.weights_bytes
        work += _draft_work_bytes(config, draft)
        pools = _with_states(
            with_draft(model, draft, config.page_size, config.tp_size), config, model
        )
    rest = free_bytes - weights - work
    kv_tokens = _kv_tokens(asked, config, pools, rest, free_bytes, weights)
    if pools.window and pools.window_tokens(kv_tokens) >= kv_tokens:
        # Two pools would take more memory than one.
        pools = one_pool(model, config.page_size)
        kv_tokens = _kv_tokens(asked, config, pools, rest, free_bytes, weights)
    context = min(config.context_length, kv_tokens)
    sizing = Sizing(
        free_bytes=free_bytes,
        weight_bytes=weights,
        work_bytes=work,
        kv_tokens=kv_tokens,
        pools=pools,
        context_length=context,
        note=f"context cut from {config.context_length:,} to {context:,} tokens to fit the KV cache"
        if context < config.context_length
        else "",
    )
    _check_fit(asked, config, model, sizing)
    return sizing


def _pools(asked: EngineConfig, config: EngineConfig, model: ModelConfig) -> KvPools:
    """The pools of KV: one, or a second one for layers with windows. There is only one for the code
    of transformers, whose attention reads one table of slots for all layers; beside layers that
    keep a state, if KV leaves the pool; and on a GPU with what does not work with two pools there:
    states, drafts, pictures whose tokens see later ones, and KV in the memory of the host."""
    leaves_pool = stores_kv(config) or config.disaggregation_mode != "none"
    has_one_table = bool(model.library_config or (model.state_bytes and leaves_pool))
    if config.device != "cpu":
        sees_both_ways = model.vision is not None and model.vision.rules.sees_both_ways
        drafts = config.speculative != OFF
        has_states = model.state_bytes > 0
        is_simple = not (drafts or sees_both_ways or has_states or leaves_pool)
        has_one_table = has_one_table or not is_simple
    if config.disable_hybrid_swa_memory or has_one_table:
        return one_pool(model, config.page_size)
    # The context is cut to the given size of the cache.
    context_length = min(config.context_length, asked.kv_tokens or config.context_length)
    return two_pools(
        model,
        page_size=config.page_size,
        chunk_len=config.chunked_prefill_size,
        context_length=context_length,
        ratio=config.swa_full_tokens_ratio,
        is_chosen=asked.kv_tokens > 0,
    )


def _with_states(pools: KvPools, config: EngineConfig, model: ModelConfig) -> KvPools:
    if model.state_bytes and config.max_mamba_cache_size == 1:
        raise SettingsError(
            "--max-mamba-cache-size is 1; at least 2 states are needed: the one that a request "
            "continues from, and its own"
        )
    return with_states(
        pools,
        model,
        num_slots=config.max_mamba_cache_size,
        ratio=config.mamba_full_memory_ratio,
        context_length=config.context_length,
    )


def _kv_tokens(
    asked: EngineConfig,
    config: EngineConfig,
    pools: KvPools,
    rest: int,
    free_bytes: int,
    weights: int,
) -> int:
    """Tokens of the KV cache: the user's number in whole pages, or as many as its bytes hold."""
    if asked.kv_tokens:
        return rounded_up(asked.kv_tokens, config)
    fitting = pools.fitting(_kv_budget(asked, config, pools, weights, rest, free_bytes))
    # If every layer has a window, the other pool takes no memory: more tokens fit than are useful.
    return min(fitting, _most_tokens(config))


def _kv_budget(
    asked: EngineConfig,
    config: EngineConfig,
    pools: KvPools,
    weights: int,
    rest: int,
    free_bytes: int,
) -> int:
    """Bytes for the KV cache if the user gave no size. `rest`: bytes left by weights and work."""
    one_context = pools.num_bytes(rounded_up(config.context_length, config))
    useful = pools.num_bytes(_most_tokens(config))
    if asked.memory_fraction:
        return min(useful, rest, int(free_bytes * asked.memory_fraction) - weights)
    budget = min(useful, int(rest * KV_SHARE[config.device]))
    if config.device == "cpu":
        budget = min(budget, max(CPU_KV_BYTES, one_context))
    if asked.context_length:
        budget = max(budget, min(one_context, int(rest * LARGEST_KV_SHARE)))
    return budget


def _most_tokens(config: EngineConfig) -> int:
    """Tokens of all requests that may run, each with a whole context: more are not needed."""
    num_requests = config.max_running_requests or MAX_RUNNING
    return num_requests * rounded_up(config.context_length, config)


def rounded_up(num_tokens: int, config: EngineConfig) -> int:
    return -(-num_tokens // config.page_size) * config.page_size


def work_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of memory during a step: activations of the longest piece of a prompt, logits,
    libraries, and encoded pictures that are kept; on a GPU also graphs, which have their own
    activations, and the table of slots.
    """
    tokens = config.context_length
    if config.chunked_prefill_size > 0:
        tokens = config.chunked_prefill_size
    on_gpu = config.device == "cuda"
    widened = 0
    if on_gpu:
        tokens += max((*graph_sizes(config), *prompt_graph_sizes(config)), default=0)
        if (
            config.quantize == "int4"
        ):  # expanded at each use: 10 bytes per weight of the largest matrix
            widened = 10 * 2 * model.hidden_size * model.intermediate_size
    per_token = 4 * model.hidden_size + model.inner_size + model.mixer_size
    activations = tokens * (per_token + model.layer_inputs_size) * 4
    logits = 2 * (config.max_running_requests or MAX_RUNNING) * model.vocab_size * 4
    encoder = 0
    if model.vision is not None:
        encoder = 4 * model.vision.num_work_floats
        encoder += config.encoder_cache_tokens * encoded_bytes(model)
    return (
        activations
        + encoder
        + widened
        + logits
        + (graph_bytes(config) if on_gpu else 0)
        + LIBRARY_BYTES[config.device]
    )


def encoded_bytes(model: ModelConfig) -> int:
    """Bytes of the vectors of one token of a picture, in float32."""
    if model.decoder.cross is not None:
        return 4 * model.hidden_size * 2 * model.num_layers  # keys and values
    return 4 * model.hidden_size * (1 + model.decoder.deepstack)


def heard_rows(config: EngineConfig, model: ModelConfig, free_bytes: int) -> int:
    """Requests that may run in a model whose tokens attend to an encoder's vectors, each with
    memory for these: the user's number, or as many as a share of the free memory holds. 0: the
    model attends to none."""
    if model.decoder.cross is None:
        return 0
    if config.max_running_requests:
        return config.max_running_requests
    fitting = int(free_bytes * HEARD_SHARE) // model.heard_bytes
    return max(1, min(fitting, MAX_HEARD))


def _draft_work_bytes(config: EngineConfig, draft: ModelConfig) -> int:
    """Bytes of memory of a draft model besides its weights and the K and V of known tokens: its
    work during a step, and K and V of its drafts."""
    num_drafts = (config.max_running_requests or MAX_RUNNING) * config.max_draft
    work = work_bytes(config, draft) - LIBRARY_BYTES[config.device]
    return work + num_drafts * draft.kv_bytes_per_token


def _check_fit(
    asked: EngineConfig, config: EngineConfig, model: ModelConfig, sizing: Sizing
) -> None:
    """Raise TooLarge if weights, work and the smallest useful KV cache do not fit into memory, and
    SettingsError for a KV cache in which no request can run."""
    shortest = asked.context_length or min(config.context_length, MIN_CONTEXT)
    if asked.context_length and 0 < asked.kv_tokens < asked.context_length:
        raise SettingsError(
            f"--kv-tokens is {asked.kv_tokens:,}, less than --context-length "
            f"({asked.context_length:,}): a request of that length could never run"
        )
    room = sizing.free_bytes - sizing.weight_bytes - sizing.work_bytes
    fitting = sizing.pools.fitting(room)
    if asked.kv_tokens:
        fits = sizing.kv_tokens <= fitting
    else:
        fits = sizing.kv_tokens >= shortest
    if fits:
        return
    wanted = shortest
    if asked.kv_tokens:
        wanted = sizing.kv_tokens
    raise TooLarge(
        f"{model.name} does not fit into memory: weights take {size(sizing.weight_bytes)}, the "
        f"work {size(sizing.work_bytes)}, a KV cache of {wanted:,} tokens "
        f"{size(sizing.pools.num_bytes(wanted))}, and {size(sizing.free_bytes)} are free. "
        f"{_cure(asked, config, sizing, fitting, shortest)}"
    )


def _cure(
    asked: EngineConfig, config: EngineConfig, sizing: Sizing, fitting: int, shortest: int
) -> str:
    """A sentence that names the option that makes the model fit. `fitting`: tokens that fit;
    `shortest`: tokens of the shortest useful context."""
    if fitting >= config.page_size:
        if asked.kv_tokens:
            return f"Lower --kv-tokens: {fitting:,} fit."
        if asked.memory_fraction and fitting >= shortest:
            needed = sizing.weight_bytes + sizing.pools.num_bytes(shortest)
            enough = needed / sizing.free_bytes
            return (
                f"Raise --memory-fraction (now {asked.memory_fraction:g}): {enough + 0.01:.2f} is "
                "enough."
            )
        if asked.context_length:
            pages = int(fitting * LARGEST_KV_SHARE) // config.page_size
            return f"Lower --context-length: {pages * config.page_size:,} fits."
    if asked.max_running_requests and sizing.work_bytes > sizing.free_bytes:
        return f"Lower --max-running-requests, {asked.max_running_requests:,}."
    narrow = ""
    if config.dtype == "float32":
        narrow = ", take --dtype bfloat16"
    return f"Free some memory{narrow} or take a smaller model."


def window_tokens(config: EngineConfig) -> int:
    """Tokens in the pool of layers with windows; 0: all layers share one pool. `config` is
    resolved."""
    num_pages = config.kv_tokens / config.page_size * config.swa_full_tokens_ratio
    return round(num_pages) * config.page_size
