"""Builds the parts that hand KV over between servers: settings, socket, and the facts on which the
bits of K and V depend."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from weft.assemble.cache import (
    REMEMBERED,
    kernels_of,
    memory_of,
    weight_store,
    weights_digest,
    with_added,
)
from weft.config.engine import EngineConfig
from weft.config.handoff import PREFILL
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.sizing import window_tokens
from weft.executor.runner import TorchRunner
from weft.handoff.decode import DecodeSide
from weft.handoff.facts import Facts, KvFacts
from weft.handoff.prefill import BACKLOG, PrefillSide
from weft.memory.handoff.protocol import Handoff
from weft.observe.log import EventLog
from weft.scheduler.settings import HandoffSettings
from weft.tiers.keys import fingerprint_of
from weft.version import __version__
from weft.weights.origin import WeightOrigin

log = EventLog("handoff")


def handoff_settings(config: EngineConfig) -> HandoffSettings | None:
    """The settings of the scheduler for a handoff; None if prefill and decode are on one server."""
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
    """Start the prefill or decode side of a handoff, for an engine that has loaded `model`. Raises
    SettingsError if it cannot listen."""
    store = weight_store(runner)
    pages, resume_states = memory_of(config, model, [store.kv_cache])
    store.follows_origin = True
    described = described_facts(config, model, kernels_of(config, runner))
    remembered = None if cache_folder is None else cache_folder / REMEMBERED
    digests: dict[WeightOrigin, bytes] = {}

    def weights() -> Callable[[], Facts]:
        """A function that finds the facts of the weights in use now."""
        return partial(_with_weights, described, store.origin, remembered, digests)

    facts = KvFacts(weights)
    side: PrefillSide | DecodeSide
    if config.disaggregation_mode == PREFILL:
        side = PrefillSide(
            listen(config),
            pages,
            page_size=config.page_size,
            secret=config.handoff_secret,
            lease_s=config.handoff_lease_s,
            facts=facts,
            notify=notify,
            resume_states=resume_states,
        )
    else:
        if not config.handoff_secret and not config.handoff_lenders:
            log.warning(
                "any_lender",
                meaning="requests may name any port of this machine as a prefill server, and only "
                "those that name it use its KV",
                remedy="--handoff-lenders, or --handoff-secret",
            )
        side = DecodeSide(
            pages,
            page_size=config.page_size,
            secret=config.handoff_secret,
            facts=facts,
            notify=notify,
            resume_states=resume_states,
        )
    side.start()
    return side


def listen(config: EngineConfig) -> socket.socket:
    """The socket on which a prefill server lends KV. Raises SettingsError."""
    host = config.handoff_host
    port = config.disaggregation_bootstrap_port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise SettingsError(
            f"--disaggregation-bootstrap-port: cannot listen on {host}:{port}: {exc.strerror}"
        ) from exc


def described_facts(config: EngineConfig, model: ModelConfig, kernels: str) -> Facts:
    """The facts, besides the weights, that must be equal on both sides; error messages use their
    names."""
    # The name of a model does not change its bits.
    shape = fingerprint_of([repr(replace(model, name=""))], b"")
    return {
        "version of weft": __version__,
        "type of the model": model.dtype,
        "type of the KV cache": model.kv_dtype or model.dtype,
        "page size": str(config.page_size),
        "memory of layers with windows": "its own" if window_tokens(config) else "that of all",
        "kind of computation": kernels,
        "digest of the model's shape": shape.hex()[:16],
    }


def _with_weights(
    described: Facts,
    origin: WeightOrigin,
    remembered: Path | None,
    digests: dict[WeightOrigin, bytes],
) -> Facts:
    """All facts. Reads all weights, unless `digests` or the file `remembered` has the digest of the
    checkpoint. Raises OSError."""
    checkpoint = origin._replace(added=b"")
    base = digests.get(checkpoint)
    if base is None:
        base = weights_digest(checkpoint, remembered)
        digests.clear()
        digests[checkpoint] = base
    weights = with_added(base, origin)
    return {**described, "digest of the weights": weights.hex()[:32]}
