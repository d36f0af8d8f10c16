"""The vectors that the model's encoder has made, on the device, by digest.

Plans say what is encoded, taken and dropped (`MediaVectors`): the scheduler keeps the books, and
this does what they say. What cannot be encoded harms no other request: NaN stands for its vectors,
and the step's result names it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.vision.tower import Tower, TowerInput, at_once
from weft.observe.log import EventLog
from weft.ops.sampling import on
from weft.plan.inputs import EncoderInput, MediaVectors

log = EventLog("runner")


class MediaStore:
    def __init__(self, tower: Tower, *, hidden_size: int, device: torch.device) -> None:
        """`hidden_size` of the decoder: a vector has so many numbers, or a multiple of it."""
        self._tower = tower
        self._hidden_size = hidden_size
        self._like = torch.empty(0, device=device)
        self._vectors: dict[bytes, Tensor] = {}  # [length, numbers of a vector] each
        self._errors: dict[bytes, str] = {}  # of those that could not be encoded
        self._taken_in_vain: list[tuple[bytes, str]] = []  # by the present step
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
            self._encode(one)
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
        together = torch.cat([F.pad(one, (0, width - one.shape[1])) for one in found])
        return together.index_select(0, on(self._like, rows)).float()

    def take_errors(self) -> tuple[tuple[bytes, str], ...]:
        """What the present step has taken though it could not be encoded, by digest, and why."""
        taken = tuple(self._taken_in_vain)
        self._taken_in_vain = []
        return taken

    def clear(self) -> None:
        """Forget everything: weights are other ones, or memory is wanted."""
        self._vectors.clear()
        self._errors.clear()

    def _encode(self, one: EncoderInput) -> None:
        self.num_runs += 1
        try:
            values = torch.tensor(one.values.array, dtype=torch.float32)
            given = TowerInput(one.kind, one.length, one.grid, values.to(self._like.device))
            vectors = at_once(self._tower.encode(given))
            num_vectors, width = vectors.shape
            if num_vectors != one.length or width % self._hidden_size:
                raise ValueError(
                    f"it gave {num_vectors} vectors of {width} numbers; needed are {one.length} "
                    f"of {self._hidden_size}, or of a multiple of that"
                )
        except Exception as exc:
            log.exception("not_encoded", exc, kind=one.kind, digest=one.digest.hex())
            self._errors[one.digest] = f"the {one.kind} encoder failed ({type(exc).__name__})"
            shape = (one.length, self._hidden_size)
            vectors = torch.full(shape, torch.nan, device=self._like.device)
        # A tower may compute in memory that it uses again.
        self._vectors[one.digest] = vectors.clone()
