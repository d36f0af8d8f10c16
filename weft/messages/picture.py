"""What the engine does, as one message: asked for while somebody looks at the live page.

Numbers of many steps, rows or nodes come as columns, packed in the byte order of the machine, so
that a picture costs the engine next to nothing. Nothing here decides anything.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from weft.messages.calls import ControlReply, ControlRequest
from weft.messages.pins import PinStatus
from weft.messages.status import Stats


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """N successive steps, the oldest first."""

    numbers: bytes = b""  # int64 [N] of the steps
    modes: bytes = b""  # int32 [N] `ForwardMode`
    num_rows: bytes = b""  # int32 [N] requests in the step
    num_prompts: bytes = b""  # int32 [N] of these, requests whose prompts were computed
    num_tokens: bytes = b""  # int32 [N] that the step computed
    num_waiting: bytes = b""  # int32 [N] requests in the queue when it was planned
    seconds: bytes = b""  # float32 [N] that the step took


class RowColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The R requests that have a row, in the order of their arrival."""

    rids: list[str] = []  # [R]
    tenants: list[str] = []  # [R] whom the policy `fair` serves
    is_decoding: bytes = b""  # int32 [R] 0 while the prompt is computed
    prompt_len: bytes = b""  # int32 [R]
    cached_len: bytes = b""  # int32 [R] of the prompt, found in the cache
    kv_len: bytes = b""  # int32 [R] tokens that are computed, or are being computed
    fill_len: bytes = b""  # int32 [R] tokens to compute before the next one can be sampled
    num_output: bytes = b""  # int32 [R]
    max_len: bytes = b""  # int32 [R] prompt and output together, at most
    age_s: bytes = b""  # float32 [R] since they arrived


class QueueColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The first Q requests that wait, as they came; retracted ones before them."""

    rids: list[str] = []  # [Q]
    reasons: list[str] = []  # [Q] why each waits
    age_s: bytes = b""  # float32 [Q] since they arrived


class TreeColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The N heaviest nodes of the prefix cache, parents before their children.

    A walk collects them in pieces, while the tree changes: it is no snapshot.
    """

    round: int = 0  # number of the walk
    num_nodes: int = 0  # that the walk has seen
    is_whole: bool = True  # it came to the end; else the tree has more nodes than it may look at
    parents: bytes = b""  # int32 [N] index of the parent among these; -1: none
    numbers: bytes = b""  # int32 [N] by which `GetPrefix` asks for them, as long as one is here
    num_tokens: bytes = b""  # int32 [N] of their own
    num_below: bytes = b""  # int64 [N] tokens of the node and all below it
    ages: bytes = b""  # int64 [N] uses of the cache since their last one
    locks: bytes = b""  # int32 [N] requests that use it
    pins: bytes = b""  # int32 [N]
    heads: list[bytes] = []  # [N] the first tokens of each, int32


class Picture(ControlReply, kw_only=True):
    """The engine between two steps."""

    at_s: float  # by the engine's clock
    stats: Stats
    steps: StepColumns  # since the last that the sender has seen, as far as they are remembered
    rows: RowColumns
    queue: QueueColumns
    pins: list[PinStatus] = []  # those that were used last, the last of all at the end
    tree: TreeColumns | None = None  # None: the sender has seen it
    input_state: str = "unblocked"  # or blocked
    paused: str = ""  # the way in which generation is paused, if it is
    rank: int = 0  # of the engine, where several serve together
    others: list[Picture] = []  # of the engines with higher ranks


class Seen(NamedTuple):
    """What the sender has of one engine."""

    step: int = -1  # the last one
    round: int = 0  # the last walk over the tree


class Watch(ControlRequest[Picture]):
    """Ask for a picture of the engine's work. The engine records its steps from the first such
    request until none has come for 10 s."""

    since_step: int = -1  # the last step that the sender has seen
    since_round: int = 0  # the last walk over the tree that it has seen
    rank: int = 0  # of the engine that is asked
    seen: dict[int, Seen] = {}  # of each engine, where several are asked at once

    def for_rank(self, rank: int) -> Watch:
        """The question to one of several engines."""
        seen = self.seen.get(rank, Seen())
        return msgspec.structs.replace(
            self,
            since_step=seen.step,
            since_round=seen.round,
            rank=rank,
            seen={},
        )


class GetPrefixReply(ControlReply):
    """A node, whole. Without tokens: there is none of this number any more."""

    cache_salt: str = ""  # of the requests that find it
    adapter: str = ""  # the uid of theirs
    tokens: bytes = b""  # int32, from the first of its sequence to its own last one
    start: int = 0  # tokens of the nodes above
    hits: int = 0  # requests that have begun with it
    requests: list[str] = []  # that use it now
    pins: list[str] = []  # and the names of pins and sessions that keep it


class GetPrefix(ControlRequest[GetPrefixReply]):
    """Ask for a node of the tree of the last picture."""

    node: int
