"""What a logit processor is (docs/guides/logit-processors.md has an example)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from weft.arrays import IntArray


class Asked(NamedTuple):
    """A request whose logits are to be changed."""

    params: Mapping[str, Any]  # as it gave them: plain JSON values
    prompt: IntArray  # [n] token ids
    output: IntArray  # [m] token ids of all that it has said so far


class LogitProcessor:
    """Override `apply`, and `check` if there are parameters.

    One object serves all requests that name it, as long as the engine runs. Its changes to a row
    must depend only on that row and its `Asked`: a request may be computed again together with
    other requests, and must give the same result.
    """

    def check(self, params: Mapping[str, Any]) -> None:
        """Raise ValueError for parameters that cannot be used: the request is refused with its
        message.

        Called for each request on arrival, from another thread than `apply`; it must be quick.
        """

    def apply(self, logits: Tensor, requests: Sequence[Asked]) -> None:
        """Change logits [P, V] (float32) in place; row i belongs to `requests[i]`. -inf forbids a
        token.

        These are the requests of a step that name the processor; where they are many, a call for
        some of them each.

        What is raised here, and a row with NaN, with +inf, or with nothing but -inf, ends the
        request with an error.
        """
        raise NotImplementedError
