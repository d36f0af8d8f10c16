"""Whether a model is asked for what it is made for."""

from __future__ import annotations

from weft.messages.control import EngineReady
from weft.messages.sampling import InvalidParam, SamplingParams


def check_purpose(params: SamplingParams, engine: EngineReady) -> None:
    """Raise `InvalidParam` if tokens are asked of a model that generates none. The engine would refuse them, too, but
    behind errors about lengths that have nothing to do with it."""
    if engine.pools is None or params.max_new_tokens == 0:
        return
    gives = (
        "vectors (POST /v1/embeddings)"
        if engine.pools.task == "embed"
        else "scores of labels (POST /v1/classify)"
    )
    raise InvalidParam("model", f"this model generates no tokens; it makes {gives}")
