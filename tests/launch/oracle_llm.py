"""An LLM without a model: everything is real but for the runner, whose tokens follow from the
prompt by arithmetic."""

from __future__ import annotations

import time
from pathlib import Path

from tests.scheduler.oracle_runner import OracleRunner
from weft.assemble.build import scheduler_settings
from weft.assemble.prepare import load_tokenizer, prepare
from weft.config.engine import EngineConfig
from weft.engine.engine import Engine
from weft.llm import LLM
from weft.messages.status import EngineReady

VOCAB = 258
EOS = 257


def fail(exc: Exception) -> None:
    raise exc


def oracle_llm(folder: Path, **settings: object) -> tuple[LLM, OracleRunner]:
    """`folder` as `write_tiny_model` makes it."""
    config = EngineConfig(
        **{"model": str(folder), "kv_tokens": 2_048, "max_running_requests": 8, **settings}
    )  # type: ignore[arg-type]
    prepared = prepare(config)
    resolved = prepared.config
    runner = OracleRunner(
        num_slots=resolved.kv_tokens,
        num_rows=resolved.max_running_requests,
        max_len=resolved.context_length,
        vocab_size=VOCAB,
    )
    engine = Engine(
        scheduler_settings(resolved, prepared.model),
        runner,
        clock=time.monotonic,
        overlap=resolved.overlap,
        on_failure=fail,
    )
    ready = EngineReady(
        model_summary="oracle",
        vocab_size=VOCAB,
        context_length=resolved.context_length,
        max_prompt_tokens=resolved.context_length - 1,
        kv_tokens=resolved.kv_tokens,
        page_size=resolved.page_size,
        startup=[],
    )
    return LLM.composed(prepared, load_tokenizer(prepared.folder), engine, ready), runner
