"""Attention backends from outside of weft: `--attention-backend module:Class`, or the name of an
entry point of the group `weft.attention_backends`.

On a CPU, torch computes the rest of the model, and the backend stands within a fence: whatever it
raises or returns, the requests of its step end, and the device is not blamed. A row that is not
finite ends its own request, as with any backend. On a GPU, the backend is called as weft's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.config.engine import GPU_ATTENTION_BACKENDS
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.plugins import BACKENDS, OutsideFault, PluginError, load_object
from weft.executor.backend import AttentionBackend, AttentionBatch
from weft.executor.kv_pool import KVPool
from weft.models.layers.attention import Heads
from weft.observe.survivable import is_survivable

T = TypeVar("T")
METHODS = ("prepare", "narrow", "forward")


def is_from_outside(name: str) -> bool:
    return name not in ("auto", "torch", *GPU_ATTENTION_BACKENDS)


def own_backend(
    name: str,
    config: ModelConfig,
    pool: KVPool,
    context_length: int,
    needs: tuple[str, ...] = METHODS,
) -> Any:
    """The backend with this name, for one model. `needs`: what it must have. Raises
    SettingsError."""
    try:
        kind: Any = load_object(name, BACKENDS)
    except PluginError as exc:
        raise _refused(name, str(exc)) from exc
    if not callable(kind):
        raise _refused(name, f"it is {type(kind).__name__}, and nothing to call")
    if config.latent is not None and config.latent.indexer is not None:
        raise _refused(name, f"{config.name} has an indexer, which weft's own backends alone have")
    try:
        own = kind(config, pool, context_length)
    except (Exception, SystemExit) as exc:  # whatever it raises: it is the code of others
        raise _refused(name, f"it cannot be made: {type(exc).__name__}: {exc}") from exc
    missing = [one for one in needs if getattr(own, one, None) is None]
    if missing:
        raise _refused(name, f"it has no {', '.join(missing)}")
    return own


def fenced_backend(
    name: str, config: ModelConfig, pool: KVPool, context_length: int
) -> AttentionBackend:
    """The backend with this name within a fence, for a CPU. Raises SettingsError."""
    own = own_backend(name, config, pool, context_length)
    return FencedAttention(name, own, config)


class FencedAttention:
    """An `AttentionBackend` around another one."""

    def __init__(self, name: str, own: AttentionBackend, config: ModelConfig) -> None:
        self._name = name
        self._own = own
        self._config = config

    def prepare(self, batch: AttentionBatch) -> None:
        self._call(self._own.prepare, batch)

    def narrow(self, x: Tensor) -> Tensor:
        narrowed = self._call(self._own.narrow, x)
        if narrowed is x:
            return x
        return self._checked(narrowed, x, len(narrowed), x.shape[1])

    def forward(self, qkv: Tensor, heads: Heads, layer: int) -> Tensor:
        out = self._call(self._own.forward, qkv, heads, layer)
        width = -1  # of latents, the values may be narrower
        if self._config.latent is None:
            width = self._config.num_heads * self._config.kv_shape(layer)[1]
        return self._checked(out, qkv, len(qkv), width)

    def _call(self, method: Callable[..., T], *arguments: object) -> T:
        try:
            return method(*arguments)
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            raise self._fault(f"raised {type(exc).__name__}: {exc}") from exc

    def _checked(self, out: object, like: Tensor, length: int, width: int) -> Tensor:
        """`out`, if it is [length, width] of the type of `like`; width -1: any."""
        if not isinstance(out, torch.Tensor):
            raise self._fault(f"returned {type(out).__name__} instead of a tensor")
        expected = (length, out.shape[-1] if width < 0 else width)
        if tuple(out.shape) != expected or out.dtype != like.dtype:
            found = f"{out.dtype} {list(out.shape)}"
            raise self._fault(f"returned {found}; {like.dtype} {list(expected)} is expected")
        return out

    def _fault(self, what: str) -> OutsideFault:
        return OutsideFault(f"the attention backend {self._name} {what}")


def _refused(name: str, why: str) -> SettingsError:
    return SettingsError(f"--attention-backend: {name}: {why}")
