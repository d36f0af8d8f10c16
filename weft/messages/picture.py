"""A snapshot of the engine's work as one message, for the live page, while it is open.

Numbers of many steps, rows or nodes are columns, packed in the byte order of the machine, so that a
picture costs the engine almost no time. Nothing here influences the engine.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from weft.messages.calls import ControlReply, ControlRequest
from weft.messages.pins import PinStatus
from weft.messages.status import Stats


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """N consecutive steps, the oldest first."""

    numbers: bytes = b""  # int64 [N] of the steps
    modes: bytes = b""  # int32 [N] `ForwardMode`
    num_rows: bytes = b""  # int32 [N] requests in the step
    num_prompts: bytes = b""  # int32 [N] of these, requests whose prompts were computed
    num_tokens: bytes = b""  # int32 [N] computed tokens
    num_waiting: bytes = b""  # int32 [N] requests in the queue when the step was planned
    seconds: bytes = b""  # float32 [N] duration


class RowColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The R requests that have a row, in the order of their arrival."""

    rids: list[str] = []  # [R]
    tenants: list[str] = []  # [R] tenant for the policy `fair`
    services: list[str] = []  # [R] class of service: online or background
    is_decoding: bytes = b""  # int32 [R] 0 while the prompt is computed
    prompt_len: bytes = b""  # int32 [R]
    cached_len: bytes = b""  # int32 [R] prompt tokens that were found in the cache
    kv_len: bytes = b""  # int32 [R] tokens that are computed, or are being computed
    fill_len: bytes = b""  # int32 [R] tokens to compute before the next one can be sampled
    num_output: bytes = b""  # int32 [R]
    max_len: bytes = b""  # int32 [R] limit of prompt and output together
    age_s: bytes = b""  # float32 [R] seconds since the arrival
    # [R] why not more of the prompt was cached (docs/guides/why-slow.md); "" until it is known
    causes: list[str] = []
    missed_len: bytes = b""  # int32 [R] prompt tokens that would have been cached otherwise


class QueueColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The first Q waiting requests: retracted ones first, then the others by arrival."""

    rids: list[str] = []  # [Q]
    services: list[str] = []  # [Q] class of service
    reasons: list[str] = []  # [Q] why each waits
    age_s: bytes = b""  # float32 [Q] seconds since the arrival


class TreeColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The N heaviest nodes of the prefix cache, parents before their children.

    A walk over the tree collects them in several steps, while the tree changes, so the columns may
    not be from one moment.
    """

    round: int = 0  # number of the walk
    num_nodes: int = 0  # nodes that the walk has visited
    is_whole: bool = True  # the walk visited all nodes; False: it reached its limit
    parents: bytes = b""  # int32 [N] index of the parent in these columns; -1: none
    numbers: bytes = b""  # int32 [N] number for `GetPrefix`, valid while the node is listed
    num_tokens: bytes = b""  # int32 [N] tokens of the node itself
    num_below: bytes = b""  # int64 [N] tokens of the node and all nodes below it
    ages: bytes = b""  # int64 [N] uses of the cache since the last use of the node
    locks: bytes = b""  # int32 [N] requests that use the node
    pins: bytes = b""  # int32 [N] pins on the node
    heads: list[bytes] = []  # [N] the first tokens of the node, int32


class Picture(ControlReply, kw_only=True):
    """The state of the engine between two steps."""

    at_s: float  # time of the engine's clock
    stats: Stats
    steps: StepColumns  # steps after the last one that the sender has, as far as they are recorded
    rows: RowColumns
    queue: QueueColumns
    pins: list[PinStatus] = []  # the most recently used pins, the latest at the end
    tree: TreeColumns | None = None  # None: the sender has the result of the last walk
    input_state: str = "unblocked"  # or blocked
    paused: str = ""  # the mode in which generation is paused; "" if it is not
    rank: int = 0  # of the engine, if several serve together
    others: list[Picture] = []  # of the engines with higher ranks


class Seen(NamedTuple):
    """The latest data of one engine that the sender has."""

    step: int = -1  # number of the last step
    round: int = 0  # number of the last walk over the tree


class Watch(ControlRequest[Picture]):
    """Ask for a picture of the engine's work. The engine records its steps from the first such
    request until none has come for 10 s."""

    since_step: int = -1  # the last step that the sender has
    since_round: int = 0  # the last walk over the tree that the sender has
    rank: int = 0  # of the engine that is asked
    seen: dict[int, Seen] = {}  # by rank, if several engines are asked at once

    def for_rank(self, rank: int) -> Watch:
        """The request for one of several engines."""
        seen = self.seen.get(rank, Seen())
        return msgspec.structs.replace(
            self,
            since_step=seen.step,
            since_round=seen.round,
            rank=rank,
            seen={},
        )


class GetPrefixReply(ControlReply):
    """One complete node. Empty `tokens`: there is no node of this number any more."""

    cache_salt: str = ""  # salt of the requests that share the node
    adapter: str = ""  # uid of the adapter of these requests
    tokens: bytes = b""  # int32, from the first token of its sequence to its own last token
    start: int = 0  # number of tokens of the nodes above
    hits: int = 0  # requests whose prompt began with the node's sequence
    requests: list[str] = []  # rids of the requests that use the node now
    pins: list[str] = []  # names of the pins and sessions that keep the node


class GetPrefix(ControlRequest[GetPrefixReply]):
    """Ask for a node of the tree in the last picture."""

    node: int
