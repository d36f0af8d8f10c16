"""The interface of logit processors (docs/guides/logit-processors.md has an example)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from weft.arrays import IntArray


class ProcessorRequest(NamedTuple):
    """A request that names the processor."""

    params: Mapping[str, Any]  # the request's parameters: plain JSON values
    prompt: IntArray  # [n] token ids
    output: IntArray  # [m] token ids of the output so far


class LogitProcessor:
    """A logit processor. Override `apply`, and `check` if it has parameters.

    One object serves all requests that name it, as long as the engine runs. Its changes to a row
    must depend only on that row and its `ProcessorRequest`, because a request may be computed again
    together with other requests, and must give the same result.
    """

    def check(self, params: Mapping[str, Any]) -> None:
        """Raise ValueError for invalid parameters. The request is then refused with the error's
        message.

        Called for each request on arrival, on another thread than `apply`. It must be quick.
        """

    def apply(self, logits: Tensor, requests: Sequence[ProcessorRequest]) -> None:
        """Change logits [P, V] (float32) in place; row i belongs to `requests[i]`. -inf forbids a
        token.

        `requests` are the requests of a step that name the processor. If there are many, they are
        divided among several calls.

        A request ends with an error if this method raises for its row, or leaves NaN, +inf, or only
        -inf in the row.
        """
        raise NotImplementedError
