"""Several towers of one model: the kind of an input says which one encodes it."""

from __future__ import annotations

from weft.config.vision.joint import JointSpec
from weft.models.layers.weight import Weights
from weft.models.vision.tower import Pieces, TowerBackend, TowerInput
from weft.models.vision.towers import make_tower


class JointTower:
    def __init__(self, spec: JointSpec, backend: TowerBackend) -> None:
        self._towers = [make_tower(part, backend) for part in spec.parts]
        self._by_kind = {
            kind: tower
            for part, tower in zip(spec.parts, self._towers, strict=True)
            for kind in part.kinds
        }

    def encode(self, input: TowerInput) -> Pieces:
        return self._by_kind[input.kind].encode(input)

    def weights(self) -> Weights:
        for tower in self._towers:
            yield from tower.weights()
