"""A transformers model in terms of `Ops`, as far as possible: translated once from its code, and
passed to `Ops` whenever a program is recorded."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from weft.models.layers.attention import PagedAttention
from weft.models.layers.rope import Rope
from weft.models.transformers_backend.translate.constants import Constants
from weft.models.transformers_backend.translate.emit import Emitter, Host, Matrices, Values
from weft.models.transformers_backend.translate.graph import (
    TABLE,
    Graph,
    Leaves,
    Run,
    Untranslatable,
    written_down,
)
from weft.models.transformers_backend.translate.meaning import Group, HeadRotation
from weft.models.transformers_backend.translate.plan import Work, planned
from weft.models.transformers_backend.translate.recognise import Recogniser
from weft.ops import fusion
from weft.ops.protocol import Ops


class Translation:
    """The work of a model: from tokens to hidden states, and from hidden states to logits."""

    def __init__(
        self,
        root: nn.Module,
        leaves: Leaves,
        body: Run,
        head: Run,
        context_length: int,
    ) -> None:
        """`body` and `head` run the code of the model. Raises `Untranslatable`."""
        self._body = _work(written_down(body, root, leaves), context_length)
        self._head = _work(written_down(head, root, leaves), context_length)
        self._constants = Constants()
        self._ropes: dict[HeadRotation, Rope] = {}

    @property
    def groups(self) -> list[Group]:
        """The matrices that are stored together."""
        return self._body.groups

    def say_body(
        self, matrices: Matrices, ops: Ops, attention: PagedAttention, host: Host
    ) -> Tensor:
        """The hidden states of the step's tokens."""
        return self._emitter(self._body, matrices, ops, attention, host).run()

    def say_head(self, hidden: Tensor, matrices: Matrices, ops: Ops, host: Host) -> Tensor:
        """The logits for hidden states [S, hidden]."""
        emitter = self._emitter(self._head, matrices, ops, None, host)
        emitter.give(self._head.inputs[0], fusion.Value(hidden))
        return emitter.run()

    def body_values(self, tokens: Tensor, positions: Tensor) -> Values:
        """The values with which torch begins a step."""
        values = _constants(self._body)
        ids, places = self._body.inputs
        values[ids] = tokens[None]
        values[places] = positions[None]
        return values

    def head_values(self) -> Values:
        return _constants(self._head)

    def refresh(self) -> None:
        """Recompute derived values after weights have changed."""
        self._constants.refresh()

    def _emitter(
        self,
        work: Work,
        matrices: Matrices,
        ops: Ops,
        attention: PagedAttention | None,
        host: Host,
    ) -> Emitter:
        return Emitter(work, matrices, self._constants, self._ropes, ops, attention, host)


def _work(graph: Graph, context_length: int) -> Work:
    tables = [node for node in graph.nodes if node.op == TABLE]
    if len(tables) > 1:
        # Prompts may have vectors in place of tokens, which only the first table would use.
        raise Untranslatable("it reads several tables of embeddings")
    recogniser = Recogniser(graph, context_length)
    recogniser.recognise()
    return planned(recogniser)


def _constants(work: Work) -> dict[Any, Any]:
    return {node: node.content.data for node in work.constants}
