"""The application without a model: it answers what concerns none, such as the page and its files,
and bodies that cannot be read. Its tokenizer is that of the bundled model, and its engine never
answers.
"""

from __future__ import annotations

import time
from dataclasses import replace

from weft.assemble.prepare import load_tokenizer
from weft.client.client import EngineClient
from weft.config.limits import Limits
from weft.config.numbers import MAX_ENGINES
from weft.config.server import ServerConfig
from weft.messages.codec import ToEngine
from weft.server.app import ModelApp, SharedParts, model_app
from weft.server.context import Readiness, ServerInfo
from weft.server.helpers import ModelHelpers
from weft.version import __version__
from weft.weights.known import NANO, known_model


def blank_app(
    config: ServerConfig,
    limits: Limits,
    readiness: Readiness,
    shared: SharedParts,
    plugins: str,
    *,
    has_keys: bool,
) -> ModelApp:
    folder = known_model(NANO)
    assert folder is not None, f"{NANO} comes with weft"
    tokenizer = load_tokenizer(folder)
    info = ServerInfo(
        model_name="several models",
        context_length=0,
        version=__version__,
        started_at=time.time(),
    )
    return model_app(
        EngineClient(tokenizer, _nobody),
        tokenizer,
        # Bodies about models are read here, and a header may name an engine of any of them.
        replace(config, any_model_name=True, dp_size=MAX_ENGINES),
        info,
        readiness,
        limits,
        None,
        ModelHelpers(None, None),  # it renders nothing
        plugins,
        shared=shared,
        has_keys=has_keys,
    )


def _nobody(message: ToEngine) -> None:
    raise AssertionError(f"{type(message).__name__} is for an engine, and there is none")
