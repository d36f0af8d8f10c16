"""Whether requests may have the logit processors that they name. Who knows that is outside of the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from weft.messages.requests import GenerateRequest
from weft.scheduler.limits.refusal import Refusal


class Processors(Protocol):
    """What is needed of `executor/logit_processors/processors.py`."""

    def wrong(self, name: str, params: Mapping[str, Any]) -> str:
        """Why a request cannot have this processor with these parameters; "" if it can."""
        ...


class NoProcessors:
    def wrong(self, name: str, params: Mapping[str, Any]) -> str:
        return f"there is no logit processor {name!r}: this engine has none"


def refusal(processors: Processors, message: GenerateRequest) -> Refusal | None:
    """Why a request is refused for what it names; None if it is not."""
    for one in message.sampling.processors:
        if wrong := processors.wrong(one.name, one.params):
            return Refusal(wrong, 400)
    return None
