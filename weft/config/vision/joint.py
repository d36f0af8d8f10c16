"""Several encoders of one model, each for its own kinds of inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.config.media import MediaRules
from weft.config.vision.spec import TowerSpec


@dataclass(frozen=True)
class JointSpec:
    """Towers with one set of rules: those of the first apply to the tokens of all, but tokens of
    which the others' rules do not say so do not see each other both ways."""

    parts: tuple[TowerSpec, ...]

    def __post_init__(self) -> None:
        assert len(set(self.kinds)) == len(self.kinds), "each kind has one encoder"

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for part in self.parts for kind in part.kinds)

    @property
    def rules(self) -> MediaRules:
        first, *others = self.parts
        rules = first.rules
        if not rules.sees_both_ways:
            return rules
        in_order: list[str] = []
        for part in others:
            if not part.rules.sees_both_ways:
                in_order += part.kinds
        return replace(rules, kinds_in_order=tuple(in_order))

    @property
    def num_parameters(self) -> int:
        return sum(part.num_parameters for part in self.parts)

    @property
    def num_work_floats(self) -> int:
        return max(part.num_work_floats for part in self.parts)

    @property
    def unread(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.unread)

    @property
    def shown_name(self) -> str:
        return "; ".join(part.shown_name for part in self.parts)


def joined(pictures: TowerSpec | None, sounds: TowerSpec | None) -> TowerSpec | None:
    """The encoders of a model that may lack one of them, or both."""
    if pictures is None:
        return sounds
    if sounds is None:
        return pictures
    return JointSpec((pictures, sounds))
