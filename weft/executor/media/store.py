"""The vectors that the model's encoder has made, on the device, by digest.

Plans say what is encoded, taken and dropped (`MediaVectors`): the scheduler keeps the accounts, and
this store follows them. An item that cannot be encoded affects no other request: its vectors are
NaN, and the step's result names it.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.executor.inputs import concatenated
from weft.models.vision.tower import Pieces, Tower, TowerInput
from weft.observe.log import EventLog
from weft.ops.sampling import on
from weft.plan.inputs import EncodeAhead, EncoderInput, HeardMedia, MediaVectors

log = EventLog("runner")


class HeardMemory(Protocol):
    """Where a decoder that attends to vectors reads keys and values."""

    width: int  # numbers of a vector: keys and values of all layers

    def write(self, row: int, vectors: Tensor) -> None:
        """Write those of a row: vectors [num_positions, width], as the tower makes them."""
        ...


class OpenWork(NamedTuple):
    """The item that is being encoded."""

    digest: bytes
    pieces: Pieces


class MediaStore:
    def __init__(
        self,
        tower: Tower,
        *,
        hidden_size: int,
        device: torch.device,
        heard: HeardMemory | None = None,
    ) -> None:
        """`hidden_size` of the decoder: a vector has this many numbers, or a multiple of it.
        `heard`: where the decoder reads keys and values, if it attends to vectors."""
        self._tower = tower
        self._heard = heard
        self._hidden_size = hidden_size
        self._like = torch.empty(0, device=device)
        self._vectors: dict[bytes, Tensor] = {}  # [length, numbers of a vector] each
        # Of an item that the current step has dropped: memory for the next one.
        self._dropped: Tensor | None = None
        self._errors: dict[bytes, str] = {}  # errors of items that could not be encoded
        # items with errors that the current step has taken
        self._taken_in_vain: list[tuple[bytes, str]] = []
        self._open: OpenWork | None = None
        self._seconds = 0.0  # working time of the encoder in the current step
        self.num_runs = 0  # of the encoder

    def __len__(self) -> int:
        """Number of items with vectors."""
        return len(self._vectors)

    @torch.inference_mode()
    def take(self, op: MediaVectors) -> Tensor:
        """Drop, encode and take as a plan says. Returns the vectors [V, numbers of a vector],
        float32."""
        self._drop_and_encode(op)
        found: list[Tensor] = []
        first_rows: list[int] = []
        num_rows = 0
        for digest in op.items:
            vectors = self._found(digest)
            found.append(vectors)
            first_rows.append(num_rows)
            num_rows += len(vectors)
        rows = op.row.copy()
        for item, first in enumerate(first_rows):
            rows[op.item == item] += first
        return concatenated(found).index_select(0, on(self._like, rows)).float()

    @torch.inference_mode()
    def hear(self, op: HeardMedia) -> None:
        """Drop, encode and write keys and values as a plan says."""
        assert self._heard is not None, "the decoder does not attend to vectors"
        self._drop_and_encode(op)
        for digest, row in zip(op.items, op.rows.tolist(), strict=True):
            vectors = self._found(digest)
            if digest in self._errors:
                vectors = vectors.new_full((len(vectors), self._heard.width), math.nan)
            self._heard.write(row, vectors)

    def take_errors(self) -> tuple[tuple[bytes, str], ...]:
        """The items with errors that the current step has taken: digest and error."""
        taken = tuple(self._taken_in_vain)
        self._taken_in_vain = []
        return taken

    @torch.inference_mode()
    def work_ahead(self, op: EncodeAhead) -> tuple[bytes, ...]:
        """Encode items for later steps. Returns the digests of those that are complete."""
        began_s = time.perf_counter()
        until_s = began_s + op.seconds
        has_worked = False
        for one in op.encode:
            is_missing = one.digest not in self._vectors
            if is_missing and (not has_worked or time.perf_counter() < until_s):
                has_worked = True
                self._work(one, until_s)
        self._seconds += time.perf_counter() - began_s
        return tuple(one.digest for one in op.encode if one.digest in self._vectors)

    def take_seconds(self) -> float:
        """Working time of the encoder since the last call, in seconds."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def clear(self) -> None:
        """Drop everything, because the weights have changed or the memory is needed."""
        self._give_up()
        self._vectors.clear()
        self._errors.clear()

    def _drop_and_encode(self, op: MediaVectors | HeardMedia) -> None:
        if op.drops_all:
            self.clear()
        for digest in op.drop:
            self._dropped = self._vectors.pop(digest, self._dropped)
            self._errors.pop(digest, None)
        for one in op.encode:
            if one.digest not in self._vectors:
                began_s = time.perf_counter()
                self._work(one, math.inf)
                self._seconds += time.perf_counter() - began_s
        self._dropped = None

    def _found(self, digest: bytes) -> Tensor:
        """The vectors of an item that a step takes, and a note if they have an error."""
        error = self._errors.get(digest)
        if error is not None:
            self._taken_in_vain.append((digest, error))
        return self._vectors[digest]

    def _work(self, one: EncoderInput, until_s: float) -> None:
        """Encode an item, or continue, until this time; at least one piece."""
        if self._open is None or self._open.digest != one.digest:
            self._give_up()
            self._open = OpenWork(one.digest, self._encoding(one))
            self.num_runs += 1
        while True:
            try:
                next(self._open.pieces)
            except StopIteration as end:
                self._vectors[one.digest] = end.value
                self._open = None
                return
            if time.perf_counter() >= until_s:
                return

    def _give_up(self) -> None:
        """Give up the item that is being encoded."""
        if self._open is not None:
            self._open.pieces.close()
            self._open = None

    def _encoding(self, one: EncoderInput) -> Pieces:
        """The vectors of an item; NaN if it cannot be encoded."""
        try:
            values = torch.tensor(one.values.array, dtype=torch.float32)
            tower_input = TowerInput(one.kind, one.length, one.grid, values.to(self._like.device))
            vectors = yield from self._tower.encode(tower_input)
            num_vectors, width = vectors.shape
            if num_vectors != one.length or width % self._hidden_size:
                raise ValueError(
                    f"it gave {num_vectors} vectors of {width} numbers; needed are {one.length} "
                    f"of {self._hidden_size}, or of a multiple of that"
                )
        except Exception as exc:
            log.exception("not_encoded", exc, kind=one.kind, digest=one.digest.hex())
            self._errors[one.digest] = f"the {one.kind} encoder failed ({type(exc).__name__})"
            return torch.full((one.length, self._hidden_size), torch.nan, device=self._like.device)
        # A copy, because a tower may compute in memory that it uses again.
        kept = self._dropped
        self._dropped = None
        if kept is None or kept.shape != vectors.shape:
            kept = torch.empty_like(vectors)
        return kept.copy_(vectors)
