"""The vectors that the model's encoder has made, on the device, by digest.

Plans say what is encoded, taken and dropped (`MediaVectors`): the scheduler keeps the books, and
this does what they say. What cannot be encoded harms no other request: NaN stands for its vectors,
and the step's result names it.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.vision.tower import Pieces, Tower, TowerInput
from weft.observe.log import EventLog
from weft.ops.sampling import on
from weft.plan.inputs import EncodeAhead, EncoderInput, MediaVectors

log = EventLog("runner")


class OpenWork(NamedTuple):
    """What is being encoded."""

    digest: bytes
    pieces: Pieces


class MediaStore:
    def __init__(self, tower: Tower, *, hidden_size: int, device: torch.device) -> None:
        """`hidden_size` of the decoder: a vector has so many numbers, or a multiple of it."""
        self._tower = tower
        self._hidden_size = hidden_size
        self._like = torch.empty(0, device=device)
        self._vectors: dict[bytes, Tensor] = {}  # [length, numbers of a vector] each
        self._errors: dict[bytes, str] = {}  # of those that could not be encoded
        self._taken_in_vain: list[tuple[bytes, str]] = []  # by the present step
        self._open: OpenWork | None = None
        self._seconds = 0.0  # that the encoder has worked in the present step
        self.num_runs = 0  # of the encoder

    def __len__(self) -> int:
        """Things whose vectors it has."""
        return len(self._vectors)

    @torch.inference_mode()
    def take(self, op: MediaVectors) -> Tensor:
        """Do what a plan says. Returns the vectors [V, numbers of a vector], float32."""
        if op.drops_all:
            self.clear()
        for digest in op.drop:
            self._vectors.pop(digest, None)
            self._errors.pop(digest, None)
        for one in op.encode:
            if one.digest not in self._vectors:
                began_s = time.perf_counter()
                self._work(one, math.inf)
                self._seconds += time.perf_counter() - began_s
        found: list[Tensor] = []
        first_rows: list[int] = []
        num_rows = 0
        for digest in op.items:
            vectors = self._vectors[digest]
            found.append(vectors)
            first_rows.append(num_rows)
            num_rows += len(vectors)
            error = self._errors.get(digest)
            if error is not None:
                self._taken_in_vain.append((digest, error))
        rows = op.row.copy()
        for place, first in enumerate(first_rows):
            rows[op.item == place] += first
        width = max(one.shape[1] for one in found)
        filled = [F.pad(one, (0, width - one.shape[1])) for one in found]
        together = torch.cat(filled)
        return together.index_select(0, on(self._like, rows)).float()

    def take_errors(self) -> tuple[tuple[bytes, str], ...]:
        """What the present step has taken though it could not be encoded, by digest, and why."""
        taken = tuple(self._taken_in_vain)
        self._taken_in_vain = []
        return taken

    @torch.inference_mode()
    def work_ahead(self, op: EncodeAhead) -> tuple[bytes, ...]:
        """Work on what later steps will take. Returns what of it is there, by digest."""
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
        """How long the encoder has worked since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def clear(self) -> None:
        """Forget everything: weights are other ones, or memory is wanted."""
        self._give_up()
        self._vectors.clear()
        self._errors.clear()

    def _work(self, one: EncoderInput, until_s: float) -> None:
        """Encode it, or go on with that, up to this moment; at least a piece of it."""
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
        """What is being encoded is not wanted any more."""
        if self._open is not None:
            self._open.pieces.close()
            self._open = None

    def _encoding(self, one: EncoderInput) -> Pieces:
        """Its vectors; NaN, if it cannot be encoded."""
        try:
            values = torch.tensor(one.values.array, dtype=torch.float32)
            given = TowerInput(one.kind, one.length, one.grid, values.to(self._like.device))
            vectors = yield from self._tower.encode(given)
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
        # A tower may compute in memory that it uses again.
        return vectors.clone()
