"""Combines the runner of a model and that of its draft model."""

from __future__ import annotations

from dataclasses import replace

from weft.executor.assembly import RunnerSpec
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.executor.drafting.steps import DraftPass
from weft.executor.heads.guessing import GuessPasses, GuessRunner
from weft.executor.ranks.build import drafting_of_ranks
from weft.executor.runner import TorchRunner


def draft_spec(spec: RunnerSpec) -> RunnerSpec:
    """The spec of the draft model's runner: it has as many slots as the model, and more for
    drafts."""
    assert spec.draft is not None, "there is no draft model"
    return replace(
        spec,
        engine=spec.draft.engine,
        model=spec.draft.model,
        folder=spec.draft.folder,
        kv_tokens=spec.kv_tokens + spec.max_rows * spec.engine.max_draft,
        processors=None,
        draft=None,
        ranks=None,  # rank 0 alone has the draft model
    )


def paired(runner: TorchRunner, draft: TorchRunner) -> TorchRunner:
    """A runner of both models. They share the table of slots."""
    guesses: GuessRunner = GuessPasses(draft.run)
    if isinstance(draft.steps, CpuFusedSteps) and not draft.passes:
        guesses = draft.steps
    drafting = DraftPass(guesses, draft.do)
    return runner.within(*drafting_of_ranks(runner.passes), drafting)
