"""Puts an engine together: model, runner, scheduler. Used by the engine process and by `weft.LLM`."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.pairs import parse_recv_weights, parse_tenant_weights
from weft.config.resolve import count, kept_as, size
from weft.engine.engine import Engine
from weft.executor.build import load_runner
from weft.executor.logit_processors.load import load_processors
from weft.executor.logit_processors.processors import Processors
from weft.executor.profile.profile import ProfiledRunner
from weft.executor.runner import EncoderRunner, TorchRunner
from weft.grammar.backends import make_compiler, missing
from weft.grammar.pool import GrammarPool
from weft.grammar.protocol import Grammars, NoGrammars
from weft.grammar.sandbox import SandboxProcess
from weft.journal.file import JournalError, JournalWriter
from weft.journal.recorder import RecordedEngine
from weft.messages.pooling import PoolingParams
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.messages.status import EngineReady, Pools
from weft.messages.wakeup import WakeupPipe
from weft.observe import garbage
from weft.plan.step import ForwardMode
from weft.scheduler.settings import PoolingLimits, SchedulerSettings, SessionLimits

WARM_UP_ID = -1


class Built(NamedTuple):
    engine: Engine | RecordedEngine
    runner: TorchRunner | EncoderRunner
    ready: EngineReady
    wakeup: WakeupPipe  # notified when there is something to do that no message has said


def build_engine(config: EngineConfig, folder: Path) -> Built:
    """Load the model in `folder` and generate a token with it. `config` is resolved.

    Raises ModelError for a model that cannot be loaded, SettingsError for a journal that cannot be written, for logit
    processors that cannot be loaded, and for a grammar library that is not there.
    """
    model = kept_as(config, ModelConfig.from_folder(folder, Path(config.model).name or folder.name))
    began = time.monotonic()
    journal, processors = _journal(config), load_processors(config.logit_processors)
    wakeup = WakeupPipe()
    grammars = _grammars(config, model, folder, wakeup)
    runner = load_runner(
        config,
        model,
        folder=folder,
        kv_tokens=config.kv_tokens,
        page_size=config.page_size,
        max_rows=config.max_running_requests,
        context_length=config.context_length,
        processors=processors,
    )
    loaded = time.monotonic()
    settings = scheduler_settings(config, model)
    traces = Path(config.profile_dir) if config.profile_dir else None
    profiled = ProfiledRunner(runner, traces, has_gpu=config.device == "cuda")
    engine = _engine(config, settings, profiled, journal, grammars, processors)
    _warm_up(engine, settings.pooling)
    warm = time.monotonic()
    garbage.freeze()
    ready = EngineReady(
        dtype=model.dtype,
        model_summary=f"{model.name} ({count(model.num_parameters)}, {model.dtype})",
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        gives_hidden_states=config.enable_return_hidden_states,
        context_length=engine.scheduler.max_len,
        max_prompt_tokens=engine.scheduler.max_len - (model.pooling is None),
        kv_tokens=config.kv_tokens,
        page_size=config.page_size,
        max_running_requests=config.max_running_requests,
        startup=[
            ("weights", f"{size(model.weights_bytes)} loaded", loaded - began),
            ("warm-up", "2 tokens" if model.pooling is None else "a prompt", warm - loaded),
        ],
        pools=_pools(model, settings.pooling),
    )
    return Built(engine, runner, ready, wakeup)


def scheduler_settings(config: EngineConfig, model: ModelConfig) -> SchedulerSettings:
    """What the scheduler needs of the engine's settings and the model."""
    chunk = config.chunked_prefill_size
    return SchedulerSettings(
        num_pages=config.kv_tokens // config.page_size,
        page_size=config.page_size,
        max_running_requests=config.max_running_requests,
        context_length=config.context_length,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        eos_token_ids=model.eos_token_ids,
        prefix_cache=config.prefix_cache,
        policy=config.schedule_policy,
        aging_s=config.aging_s,
        low_priority_first=config.low_priority_first,
        preemption_threshold=config.preemption_threshold,
        tenant_weights=parse_tenant_weights(config.tenant_weights, "--tenant-weights"),
        max_step_s=config.max_step_ms / 1_000,
        max_prefill_tokens=max(config.max_prefill_tokens, config.page_size),
        chunked_prefill_size=None if chunk < 0 else chunk,
        mixed_chunk=config.mixed_chunk,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        max_queue_s=config.max_queue_s,
        max_run_s=config.max_run_s,
        schedule_conservativeness=config.schedule_conservativeness,
        sessions=SessionLimits(
            max_sessions=config.max_sessions,
            max_per_owner=config.max_sessions_per_key,
            max_turns=config.max_session_turns,
            max_tokens=config.max_session_tokens,
            timeout_s=config.session_timeout_s,
        ),
        pooling=_pooling_limits(model),
        seed=config.seed,
    )


def _pooling_limits(model: ModelConfig) -> PoolingLimits | None:
    if model.pooling is None:
        return None
    is_embedding = model.pooling.task == "embed"
    size = model.hidden_size if is_embedding else len(model.pooling.labels)
    return PoolingLimits(
        size=size, num_token_types=model.num_token_types, is_embedding=is_embedding
    )


def _pools(model: ModelConfig, limits: PoolingLimits | None) -> Pools | None:
    """What the front has to know of it."""
    if model.pooling is None or limits is None:
        return None
    labels, types = list(model.pooling.labels), limits.num_token_types
    return Pools(task=model.pooling.task, size=limits.size, labels=labels, num_token_types=types)


def recv_weights(config: EngineConfig) -> dict[ForwardMode, int]:
    """What steps count for `--recv-interval`, by their mode."""
    given = parse_recv_weights(
        config.recv_weights, [mode.name.lower() for mode in ForwardMode], "--recv-weights"
    )
    return {mode: given.get(mode.name.lower(), 1) for mode in ForwardMode}


def _journal(config: EngineConfig) -> JournalWriter | None:
    try:
        return JournalWriter(Path(config.journal)) if config.journal else None
    except JournalError as exc:
        raise SettingsError(f"--journal: {exc}") from exc


def _grammars(
    config: EngineConfig, model: ModelConfig, folder: Path, wakeup: WakeupPipe
) -> Grammars:
    """The grammar service. Nothing is loaded before the first grammar comes."""
    if config.grammar_backend == "none":
        return NoGrammars(
            "this server was started without structured output (--grammar-backend none)"
        )
    if package := missing(config.grammar_backend):
        raise SettingsError(
            f"--grammar-backend {config.grammar_backend} is not installed: pip install {package}"
        )
    vocabulary = (
        config.grammar_backend,
        folder / "tokenizer.json",
        model.vocab_size,
        model.eos_token_ids,
    )
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
    runner: ProfiledRunner,
    journal: JournalWriter | None,
    grammars: Grammars,
    processors: Processors,
) -> Engine | RecordedEngine:
    """The engine, with a journal if there is to be one."""
    if journal is None:
        return Engine(
            settings,
            runner,
            clock=time.monotonic,
            overlap=bool(config.overlap),
            on_failure=_log_failure,
            profiler=runner,
            grammars=grammars,
            processors=processors,
        )
    return RecordedEngine(
        settings,
        runner,
        clock=time.monotonic,
        overlap=bool(config.overlap),
        on_failure=_log_failure,
        sink=journal,
        max_bytes=config.journal_max_mb * 1_000_000,
        profiler=runner,
        grammars=grammars,
        processors=processors,
    )


def _warm_up(engine: Engine | RecordedEngine, pooling: PoolingLimits | None) -> None:
    """Take the path that will serve: a prefill, and a decode step or a vector. A journal begins after it."""
    prompt = np.zeros(1, dtype=np.int32).tobytes()
    sampling = SamplingParams(
        max_new_tokens=2 if pooling is None else 0, temperature=0.0, ignore_eos=True
    )
    asked = None if pooling is None else PoolingParams()
    engine.submit(
        GenerateRequest(
            id=WARM_UP_ID, rid="warm-up", input_ids=prompt, sampling=sampling, pooling=asked
        )
    )
    while engine.has_work:
        engine.step()
    engine.start_over()


def _log_failure(exc: Exception) -> None:
    logging.getLogger("weft.engine").error("a step failed", exc_info=exc)
