"""Builds an engine: model, runner, grammars, scheduler, journal. The engine process and `weft.LLM`
use it.

    settings ─▶ parts ─▶ runner with weights ─▶ engine ─▶ a first token ─▶ `EngineReady`

It knows no socket and no process, and leaves the meaning of settings to the parts.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.assemble.cache import make_tiers, open_cache, tier_settings
from weft.assemble.draft_runner import draft_spec
from weft.assemble.handoff import handoff_settings, make_handoff
from weft.assemble.kv_events import make_cache_events
from weft.assemble.model_config import choose_model
from weft.assemble.ranks import StartedRanks
from weft.config.amounts import parameters, size, stored_types, types
from weft.config.cache import outlives, stores_kv
from weft.config.draft_model import kind_of
from weft.config.engine import EngineConfig
from weft.config.media import MediaRules
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.parallel import num_ranks
from weft.config.plugins import plugin_names
from weft.config.resolve import kept_as
from weft.config.scheduling import scheduling_values
from weft.config.sizing import encoded_bytes, window_tokens
from weft.engine.engine import Engine
from weft.executor.build import load_runner
from weft.executor.logit_processors.load import load_processors
from weft.executor.logit_processors.processors import Processors
from weft.executor.outside.attention import is_from_outside
from weft.executor.profile.profile import RunnerProfiler
from weft.executor.runner import TorchRunner
from weft.grammar.backends import make_compiler, missing
from weft.grammar.pool import GrammarPool
from weft.grammar.protocol import Grammars, NoGrammars
from weft.grammar.sandbox import SandboxProcess
from weft.journal.file import JournalError, JournalWriter
from weft.journal.recorder import RecordedEngine
from weft.memory.events.protocol import CacheEvents
from weft.memory.handoff.protocol import Handoff, NoHandoff
from weft.memory.tiers.protocol import NoTiers, Tiers
from weft.messages.media import MediaItem
from weft.messages.requests import GenerateRequest, PoolingParams
from weft.messages.sampling import SamplingParams
from weft.messages.status import EngineReady, Pools
from weft.messages.wakeup import WakeupPipe
from weft.observe import garbage
from weft.parallel.peers import Peers
from weft.scheduler.settings import (
    DraftSettings,
    PoolingLimits,
    SchedulerSettings,
    SessionLimits,
    StateSettings,
    WindowSettings,
)
from weft.weights.in_use import mark_in_use

WARM_UP_ID = -1


class Built(NamedTuple):
    """An engine that has generated its first token."""

    engine: Engine | RecordedEngine
    runner: TorchRunner
    ready: EngineReady
    wakeup: WakeupPipe  # notified of work that comes without a message
    # Loads what only some requests need, in a thread; it may hold up steps, so it waits for a rest.
    at_rest: Callable[[], object] | None = None
    ranks: StartedRanks | None = None  # other processes that hold the model; they end with it
    # Ends the threads, processes and files of the engine, at the latest when it is collected.
    close: Callable[[], object] = lambda: None


def build_engine(config: EngineConfig, folder: Path, peers: Peers | None = None) -> Built:
    """Load the model in `folder` and generate a token with it. `config` is resolved. `peers`: the
    engines that divide the model's experts with this one.

    Raises ModelError for a model that cannot be loaded, SettingsError for a journal that cannot be
    written, for logit processors that cannot be loaded, and for a grammar library that is not
    installed.
    """
    if num_ranks(config) == 1:
        return _build(config, folder, None, peers)
    ranks = StartedRanks(config, folder, choose_model(config, folder, here=True))
    try:
        built = _build(config, folder, ranks)
    except BaseException as exc:
        ranks.close(str(exc) or type(exc).__name__)
        raise
    end_ranks = weakref.finalize(built.engine, _call_all, os.getpid(), (ranks.close,))
    return built._replace(close=partial(_call_all, os.getpid(), (built.close, end_ranks)))


def _call_all(process: int, calls: Sequence[Callable[[], object]]) -> None:
    """A process that is forked from the engine's `process` ends nothing of it."""
    if process != os.getpid():
        return
    for call in calls:
        call()


def _build(
    config: EngineConfig,
    folder: Path,
    ranks: StartedRanks | None,
    peers: Peers | None = None,
) -> Built:
    """Build the engine. `ranks`: the started processes that hold the other parts of the model."""
    model = kept_as(config, choose_model(config, folder, here=True))
    began_s = time.monotonic()
    cache_folder = open_cache(config)
    journal = _journal(config)
    processors = load_processors(config.logit_processors)
    wakeup = WakeupPipe()
    grammars = _grammars(config, model, folder, wakeup)
    draft = draft_spec(config, model)
    runner = load_runner(
        config,
        model,
        folder=folder,
        kv_tokens=config.kv_tokens,
        window_tokens=window_tokens(config),
        num_state_slots=config.max_mamba_cache_size,
        page_size=config.page_size,
        max_rows=config.max_running_requests,
        context_length=config.context_length,
        processors=processors,
        draft=draft,
        ranks=None if ranks is None else ranks.join(),
        peers=peers,
    )
    if ranks is not None:
        ranks.await_loaded()
    # The weights are in memory, and so is the KV pool; nothing has been computed yet.
    loaded_s = time.monotonic()
    traces = Path(config.profile_dir).expanduser() if config.profile_dir else None
    profiler = RunnerProfiler(runner, traces, has_gpu=config.device == "cuda")
    settings = scheduler_settings(config, model, None if draft is None else draft.model)
    tiers: Tiers = NoTiers()
    if stores_kv(config):
        others = None if ranks is None else ranks.kv_caches
        tiers = make_tiers(config, model, folder, cache_folder, runner, wakeup.notify, others)
    handoff: Handoff = NoHandoff()
    if settings.handoff is not None:
        handoff = make_handoff(config, model, cache_folder, runner, wakeup.notify)
    events = make_cache_events(config)
    failures = FailureLog()
    engine = _engine(
        config,
        settings,
        runner,
        profiler,
        journal,
        grammars,
        processors,
        tiers,
        handoff,
        events,
        failures,
    )
    ends: list[Callable[[], object]] = [grammars.close, runner.close, tiers.close, handoff.close]
    ends += [events.stop, mark_in_use(folder), wakeup.close]
    close = weakref.finalize(engine, _call_all, os.getpid(), ends)
    _warm_up(engine)
    _refuse_faulty_parts(config, failures.first)
    warm_s = time.monotonic()
    # All objects of now stay: the garbage collector need not visit them again.
    garbage.freeze()
    warm_up = "a prompt"
    if model.pooling is None:
        warm_up = "2 tokens"
    if runner.kernels is None and not model.quantize:  # torch computes, and expands codes
        model = replace(model, keeps_codes=False)
    startup = [
        ("weights", _kept(model), loaded_s - began_s),
        ("warm-up", warm_up, warm_s - loaded_s),
    ]
    passes = tuple(one.name for one in runner.passes)
    ready = _ready(config, model, engine, startup, passes)
    at_rest = grammars.prepare if model.pooling is None else None
    return Built(engine, runner, ready, wakeup, at_rest, ranks, close)


def _kept(model: ModelConfig) -> str:
    """The format in which the weights are kept, and their size, as a text."""
    text = f"{size(model.weights_bytes)} loaded"
    if model.keeps_codes:
        return f"{stored_types(model)}, {text}"
    if model.stored.shown_name:
        return f"{model.stored.shown_name} kept as {model.quantize or model.dtype}, {text}"
    return text


def _ready(
    config: EngineConfig,
    model: ModelConfig,
    engine: Engine | RecordedEngine,
    startup: list[tuple[str, str, float]],
    passes: tuple[str, ...],
) -> EngineReady:
    """The facts of a loaded model that the front needs. `startup`: phases with their seconds;
    `passes`: the names of the runner's passes."""
    max_len = engine.scheduler.limits.max_len
    generates = model.pooling is None
    return EngineReady(
        dtype=model.dtype,
        model_summary=f"{model.name} ({parameters(model)}, {types(model)})",
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        gives_hidden_states=config.enable_return_hidden_states,
        context_length=max_len,
        # A model that generates needs room for one token after the prompt.
        max_prompt_tokens=max_len - 1 if generates else max_len,
        kv_tokens=config.kv_tokens,
        page_size=config.page_size,
        max_running_requests=config.max_running_requests,
        step_tokens=_step_tokens(config),
        startup=startup,
        pools=_pools(model),
        has_experts=model.has_experts,
        passes=passes,
    )


def _step_tokens(config: EngineConfig) -> int:
    """Tokens of prompts that one step computes."""
    if config.chunked_prefill_size > 0:
        return min(config.chunked_prefill_size, config.max_prefill_tokens)
    return config.max_prefill_tokens


def _pools(model: ModelConfig) -> Pools | None:
    """The facts that the front needs of a model that computes vectors or scores; None for a model
    that generates."""
    limits = _pooling_limits(model)
    if model.pooling is None or limits is None:
        return None
    return Pools(
        task=model.pooling.task,
        size=limits.size,
        labels=list(model.pooling.labels),
        num_token_types=limits.num_token_types,
        form=model.pooling.form,
        markers=model.pooling.markers,
    )


def scheduler_settings(
    config: EngineConfig, model: ModelConfig, draft: ModelConfig | None = None
) -> SchedulerSettings:
    """The settings of the scheduler, from those of the engine, the model and its draft model."""
    return SchedulerSettings(
        **scheduling_values(config),
        num_pages=config.kv_tokens // config.page_size,
        page_size=config.page_size,
        context_length=config.context_length,
        vocab_size=model.vocab_size,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        eos_token_ids=model.eos_token_ids,
        prefix_cache=config.prefix_cache,
        copies_pages=config.page_copies,
        sessions=SessionLimits(
            max_sessions=config.max_sessions,
            max_per_owner=config.max_sessions_per_key,
            max_turns=config.max_session_turns,
            max_tokens=config.max_session_tokens,
            timeout_s=config.session_timeout_s,
        ),
        pooling=_pooling_limits(model),
        windows=_windows(config, model),
        states=_states(config, model),
        draft=_draft(draft),
        media=_media(model),
        tiers=tier_settings(config, model),
        handoff=handoff_settings(config),
        num_stages=config.pp_size if config.overlap else 1,
        max_stage_rows=config.pp_max_micro_batch_size,
        seed=config.seed,
        kv_groups=plugin_names(config.plugins, "kv_groups"),
        outside_control=plugin_names(config.plugins, "control"),
    )


def _media(model: ModelConfig) -> MediaRules | None:
    """The settings of the scheduler for the model's encoder; None without an encoder."""
    if model.vision is None:
        return None
    return replace(model.vision.rules, vector_bytes=encoded_bytes(model))


def _windows(config: EngineConfig, model: ModelConfig) -> WindowSettings | None:
    """The settings of the scheduler for layers with windows; None unless these have their own
    pages."""
    num_tokens = window_tokens(config)
    if not num_tokens:
        return None
    widest = max(model.sight(layer) for layer in range(model.num_layers))
    return WindowSettings(
        window=widest.window,
        num_pages=num_tokens // config.page_size,
        chunked=widest.chunked,
    )


def _states(config: EngineConfig, model: ModelConfig) -> StateSettings | None:
    """The settings of the scheduler for layers that keep a state; None without such layers."""
    if not model.state_bytes:
        return None
    if outlives(config):
        # A request can resume from the store only after a whole number of blocks.
        num_blocks = -(-StateSettings.least_border // config.cache_block)
        least_border = num_blocks * config.cache_block
        return StateSettings(num_slots=config.max_mamba_cache_size, least_border=least_border)
    return StateSettings(num_slots=config.max_mamba_cache_size)


def _draft(draft: ModelConfig | None) -> DraftSettings | None:
    """The settings of the scheduler for the draft model; None without one."""
    if draft is None:
        return None
    return DraftSettings(
        vocab_size=draft.vocab_size,
        context_length=draft.max_position,
        source=kind_of(draft),
    )


def _pooling_limits(model: ModelConfig) -> PoolingLimits | None:
    """The limits that the scheduler checks in requests for vectors; None for a model that
    generates."""
    if model.pooling is None:
        return None
    pooling = model.pooling
    sizes = {"tokens": pooling.size, "sparse": model.vocab_size, "vector": model.hidden_size}
    is_embedding = pooling.task == "embed"
    return PoolingLimits(
        size=sizes[pooling.form] if is_embedding else len(pooling.labels),
        num_token_types=model.num_token_types,
        is_embedding=is_embedding,
        can_be_cut=is_embedding and pooling.form == "vector",
    )


def _journal(config: EngineConfig) -> JournalWriter | None:
    if not config.journal:
        return None
    try:
        return JournalWriter(Path(config.journal))
    except JournalError as exc:
        raise SettingsError(f"--journal: {exc}") from exc


def _grammars(
    config: EngineConfig, model: ModelConfig, folder: Path, wakeup: WakeupPipe
) -> GrammarPool | NoGrammars:
    """The grammar compiler. Nothing is loaded yet."""
    backend = config.grammar_backend
    if backend == "none":
        return NoGrammars(
            "this server was started without structured output (--grammar-backend none)"
        )
    package = missing(backend)
    if package:
        raise SettingsError(f"--grammar-backend {backend} is not installed: pip install {package}")
    # The first arguments of the compiler, and of the sandbox in which a grammar is tried first.
    vocabulary = (backend, folder / "tokenizer.json", model.vocab_size, model.eos_token_ids)
    return GrammarPool(
        partial(make_compiler, *vocabulary, config.threads),
        max_bytes=config.grammar_cache_mb * 1_000_000,
        make_sandbox=partial(SandboxProcess, *vocabulary, config.grammar_timeout_s),
        notify=wakeup.notify,
        jump=config.grammar_jump,
        beside=config.device == "cuda",
    )


def _engine(
    config: EngineConfig,
    settings: SchedulerSettings,
    runner: TorchRunner,
    profiler: RunnerProfiler,
    journal: JournalWriter | None,
    grammars: Grammars,
    processors: Processors,
    tiers: Tiers,
    handoff: Handoff,
    events: CacheEvents,
    on_failure: Callable[[Exception], None],
) -> Engine | RecordedEngine:
    """The engine; with a journal, an engine that records."""
    make_engine: Callable[..., Engine | RecordedEngine] = Engine
    if journal is not None:
        make_engine = partial(
            RecordedEngine,
            sink=journal,
            max_bytes=config.journal_max_mb * 1_000_000,
            state_bytes=config.journal_state_mb * 1_000_000,
        )
    return make_engine(
        settings,
        runner,
        clock=time.monotonic,
        overlap=_depth(config),
        on_failure=on_failure,
        profiler=profiler,
        grammars=grammars,
        processors=processors,
        tiers=tiers,
        handoff=handoff,
        cache_events=events,
    )


def _depth(config: EngineConfig) -> int:
    """Number of steps that are planned while one runs: one for each further stage, at least 1; 0
    without overlap."""
    if not config.overlap:
        return 0
    return max(config.pp_size - 1, 1)


def _warm_up(engine: Engine | RecordedEngine) -> None:
    """Run the code that will serve: a prefill, and a decode step or a vector. A journal begins
    after it."""
    max_new_tokens = 2
    pooling = None
    if engine.scheduler.settings.pooling is not None:
        max_new_tokens = 0
        pooling = PoolingParams()
    media: tuple[MediaItem, ...] = ()
    rules = engine.scheduler.settings.media
    if rules is not None and rules.heard_len:
        media = (_silence(rules),)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(
        id=WARM_UP_ID,
        rid="warm-up",
        input_ids=np.zeros(1, dtype=np.int32).tobytes(),
        sampling=sampling,
        pooling=pooling,
        media=media,
    )
    engine.warm_up(request)


def _silence(rules: MediaRules) -> MediaItem:
    """A sound for a model whose every request has one."""
    values = np.zeros(rules.heard_shape, dtype=np.float32).tobytes()
    return MediaItem(
        kind="audio",
        digest=bytes(32),
        start=0,
        length=0,
        num_heard=rules.heard_len,
        shape=rules.heard_shape,
        values=values,
    )


def _refuse_faulty_parts(config: EngineConfig, failure: Exception | None) -> None:
    """Raise SettingsError if the warm-up failed, and code from outside took part in it."""
    parts = [config.plugins]
    if is_from_outside(config.attention_backend):
        parts.append(f"--attention-backend {config.attention_backend}")
    named = ", ".join(filter(None, parts))
    if failure is None or not named:
        return
    raise SettingsError(
        f"the first step failed: {type(failure).__name__}: {failure} (parts from outside: {named})"
    ) from failure


class FailureLog:
    """Gets each exception of a step."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def __call__(self, exc: Exception) -> None:
        if self.first is None:
            self.first = exc
        logging.getLogger("weft.engine").error("a step failed", exc_info=exc)
