"""From settings to a runner: chooses the device, whose own `build.py` builds the runner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.config.resolve import kept_as
from weft.executor.assembly import DraftSpec, RunnerSpec
from weft.executor.cpu import build as cpu
from weft.executor.device import worker_thread
from weft.executor.drafting.build import draft_spec, paired
from weft.executor.gpu import build as gpu
from weft.executor.lockstep.group import ExpertGroup
from weft.executor.logit_processors.processors import Processors
from weft.executor.outside.passes import outside_passes
from weft.executor.passes.kinds import PassParts, make_passes
from weft.executor.runner import TorchRunner
from weft.executor.wire.followers import Ranks
from weft.parallel.peers import Peers


def load_runner(
    engine: EngineConfig,
    model: ModelConfig,
    *,
    folder: Path,
    kv_tokens: int,
    window_tokens: int = 0,
    num_state_slots: int = 0,
    page_size: int,
    max_rows: int,
    context_length: int,
    processors: Processors | None = None,
    draft: DraftSpec | None = None,
    ranks: Ranks | None = None,
    peers: Peers | None = None,
) -> TorchRunner:
    """Load the model in `folder` and make room for `kv_tokens` slots and `max_rows` requests.

    Slots are 0 to kv_tokens - 1, rows 0 to max_rows - 1. With `window_tokens`, layers with windows
    have this many slots of their own. Layers that keep a state have slots 0 to num_state_slots - 1.
    Adapters have places 0 to `engine.max_loaded_loras` - 1. A `draft` model is possible on a CPU
    only. `ranks`: the processes that share the model; None: this process has all of it. `peers`:
    the engines that share its experts.
    Raises `ModelError` if the weights cannot be used, ValueError for an unknown attention backend.
    """
    assert kv_tokens % page_size == 0, "the KV pool consists of whole pages"
    thread = worker_thread(engine.threads)
    kept = replace(kept_as(engine, model), context_length=context_length)
    spec = RunnerSpec(
        engine=engine,
        model=kept,
        folder=folder,
        kv_tokens=kv_tokens,
        window_tokens=window_tokens,
        num_state_slots=num_state_slots,
        max_rows=max_rows,
        context_length=context_length,
        thread=thread,
        processors=processors,
        draft=draft,
        ranks=ranks,
        experts=None if peers is None else ExpertGroup(peers, kept),
    )
    try:
        return thread.submit(_build, spec).result()
    except BaseException:
        thread.shutdown()
        raise


def _build(spec: RunnerSpec) -> TorchRunner:
    own = outside_passes(spec.engine.plugins)
    runner = _build_own(spec)
    return runner.within(*own) if own else runner


def _build_own(spec: RunnerSpec) -> TorchRunner:
    parts = PassParts(spec.engine, spec.model)
    if spec.engine.device == "cuda":
        device = gpu.find_gpu()
        build = gpu.build_encoder if spec.model.is_encoder else gpu.build_decoder
        return _surrounded(build(spec, device), parts)
    if spec.model.is_encoder:
        return _surrounded(cpu.build_encoder(spec), parts)
    rows = cpu.make_rows(spec)
    runner = _surrounded(cpu.build_decoder(spec, rows), parts._replace(host_rows=rows))
    if spec.draft is None or spec.draft.model.head is not None:
        return runner
    return paired(runner, cpu.build_decoder(draft_spec(spec), rows.beside()))


def _surrounded(runner: TorchRunner, parts: PassParts) -> TorchRunner:
    passes = make_passes(parts)
    return runner.within(*passes) if passes else runner
