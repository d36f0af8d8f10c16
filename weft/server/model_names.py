"""What a request's `model` and `lora_path` name: the served model, or one of its adapters (LoRA).

Every body that names a model is checked here when it has been read. An adapter of --lora-dir is
loaded when a request first names it.
"""

from __future__ import annotations

from typing import Any

from weft.client.adapters import DEFAULT_MODEL, AdapterRefused, NamedAdapter
from weft.server.context import ServerContext
from weft.server.errors import ApiError, failed
from weft.server.limits import require_accepting


async def use_named(context: ServerContext, body: Any) -> None:
    """Load the offered adapters that a body names and that are not loaded. Raises `ApiError` if one
    cannot be loaded, or if the body names an unknown model."""
    if context.adapters.offers:
        for param in ("model", "lora_path"):
            value = getattr(body, param, None)
            names = value if isinstance(value, list) else [value]
            for name in dict.fromkeys(names):
                if name:
                    await _load(context, param, context.adapters.of_model(name) or name)
    require_model(context, getattr(body, "model", None))


async def _load(context: ServerContext, param: str, name: str) -> None:
    try:
        await context.loader.load_offered(name)
    except AdapterRefused as exc:
        message = f"the adapter {name[:128]!r} cannot be loaded: {exc}"
        if exc.status == 409:  # all slots are in use now, but not forever
            raise failed(503, message) from exc
        raise ApiError(exc.status, message, param=param) from exc


def require_model(context: ServerContext, model: str | None) -> None:
    """Raise `ApiError` 404 unless `model` is absent or names the served model or an adapter, or the
    server accepts any name. During startup, raise 503 for an unknown name, which may become that of
    an adapter."""
    own_name = context.info.model_name
    if model in (own_name, None, "", DEFAULT_MODEL) or model in context.info.aliases:
        return
    if adapter_named(context, str(model)) or context.config.any_model_name:
        return
    require_accepting(context.readiness)
    message = f"the model {str(model)[:128]!r} does not exist; this server has {own_name!r}"
    if context.adapters.by_name:
        message += f" and the adapters {', '.join(map(repr, context.adapters.by_name))}"
    raise ApiError(404, message, param="model", code="model_not_found")


def adapter_named(context: ServerContext, model: str) -> NamedAdapter | None:
    """The adapter that a `model` names, as "adapter" or "served model:adapter", where an alias is
    a name of the served model, too.

    Raises `ApiError` 404 for "served model:adapter" if the adapter is not loaded, and 503 for an
    adapter that was evicted again since it was loaded for this request.
    """
    adapters = context.adapters
    found = adapters.by_name.get(model)
    if found is not None:
        return found
    name = adapters.of_model(model)
    if name is None:
        if not adapters.offered(model):
            return None
        name = model
    found = adapters.by_name.get(name)
    if found is None:
        raise _not_loaded(context, name, "model")
    return found


def _not_loaded(context: ServerContext, name: str, param: str) -> ApiError:
    require_accepting(context.readiness)
    try:
        context.adapters.uid_of(name)
    except AdapterRefused as exc:
        if exc.status == 503:
            return failed(503, str(exc))
        return ApiError(exc.status, str(exc), param=param, code="model_not_found")
    raise AssertionError(f"the adapter {name[:64]!r} is loaded")


def adapter_of(context: ServerContext, model: str | None, lora_path: str | None = None) -> str:
    """The uid of the adapter that a request names; "" for the base model. Raises `ApiError` 404 for
    an adapter that is not loaded."""
    named = adapter_named(context, model) if model else None
    if named is not None:
        return named.uid
    if not lora_path:
        return ""
    found = context.adapters.by_name.get(lora_path)
    if found is None:
        raise _not_loaded(context, lora_path, "lora_path")
    return found.uid


def answering_name(context: ServerContext, model: str | None, lora_path: str | None = None) -> str:
    """The model name of an answer: the adapter that a request names, or the served model."""
    adapters = context.adapters
    own_name = context.info.model_name
    asked = (model or "").removeprefix(f"{own_name}:")
    for name in (asked, lora_path):
        if name in adapters.by_name:
            return str(name)
    return own_name
