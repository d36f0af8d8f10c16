"""Puts together what a server needs to hand KV over: its settings, its socket, and the facts on
which the bits of its K and V depend."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from weft.assemble.cache import REMEMBERED, kernels_of, weights_digest
from weft.config.engine import EngineConfig
from weft.config.handoff import PREFILL
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.executor.cpu.kv_io import KvPages
from weft.executor.runner import TorchRunner
from weft.executor.weights.origin import WeightOrigin
from weft.executor.weights.store import WeightStore
from weft.handoff.decode import DecodeSide
from weft.handoff.prefill import BACKLOG, PrefillSide
from weft.memory.handoff.protocol import Handoff
from weft.scheduler.settings import HandoffSettings
from weft.tiers.keys import fingerprint_of
from weft.version import __version__


def handoff_settings(config: EngineConfig) -> HandoffSettings | None:
    """What the scheduler needs of the other server, where there is one."""
    if config.disaggregation_mode == "none":
        return None
    return HandoffSettings(
        mode=config.disaggregation_mode,
        lease_s=config.handoff_lease_s,
        wait_s=config.handoff_wait_s,
        fallback=config.handoff_fallback,
    )


def make_handoff(
    config: EngineConfig,
    model: ModelConfig,
    cache_folder: Path | None,
    runner: TorchRunner,
    notify: Callable[[], None],
) -> Handoff:
    """The side of an engine that has loaded `model`. Raises SettingsError where it cannot
    listen."""
    _, store, _ = runner.parts
    assert isinstance(store, WeightStore)
    pool = KvPages(store.kv_cache, config.page_size)
    facts = partial(_facts, config, model, store.origin, cache_folder, kernels_of(config, runner))
    side: PrefillSide | DecodeSide
    if config.disaggregation_mode == PREFILL:
        side = PrefillSide(
            _listen(config),
            pool,
            page_size=config.page_size,
            secret=config.handoff_secret,
            lease_s=config.handoff_lease_s,
            facts=facts,
            notify=notify,
        )
    else:
        side = DecodeSide(
            pool,
            page_size=config.page_size,
            secret=config.handoff_secret,
            facts=facts,
            notify=notify,
        )
    side.start()
    return side


def _listen(config: EngineConfig) -> socket.socket:
    host = config.handoff_host
    port = config.disaggregation_bootstrap_port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise SettingsError(
            f"--disaggregation-bootstrap-port: cannot listen on {host}:{port}: {exc.strerror}"
        ) from exc


def _facts(
    config: EngineConfig,
    model: ModelConfig,
    origin: WeightOrigin,
    cache_folder: Path | None,
    kernels: str,
) -> Mapping[str, str]:
    """What has to be the same on both sides, by the names that an error has for it. Takes as long
    as all weights take to be read."""
    remembered = None if cache_folder is None else cache_folder / REMEMBERED
    weights = weights_digest(origin, remembered)
    # A model has the same bits below every name.
    shape = fingerprint_of([repr(replace(model, name=""))], b"")
    return {
        "version of weft": __version__,
        "type of the model": model.dtype,
        "type of the KV cache": model.kv_dtype or model.dtype,
        "page size": str(config.page_size),
        "kind of computation": kernels,
        "digest of the model's shape": shape.hex()[:16],
        "digest of the weights": weights.hex()[:32],
    }
