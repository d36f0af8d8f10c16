"""The facts of every encoder of pictures, videos or sounds (a tower) before it is built.

`config/families/` names the reader that makes a tower of a `config.json` (`Family.tower`), and
`models/vision/towers.py` the class that computes it.
"""

from __future__ import annotations

from typing import Protocol

from weft.config.media import MediaRules


class TowerSpec(Protocol):
    """A tower. Each kind of tower is a frozen dataclass with these properties."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its inputs: image, video, audio."""
        ...

    @property
    def rules(self) -> MediaRules:
        """The scheduler's rules for its tokens."""
        ...

    @property
    def num_parameters(self) -> int:
        """Number of its weights, with its projection to the decoder, without biases and norms."""
        ...

    @property
    def num_work_floats(self) -> int:
        """Number of float32 values in memory while the largest usual input is encoded."""
        ...

    @property
    def unread(self) -> tuple[str, ...]:
        """Prefixes of the names, within the base model, of tensors in checkpoints that the tower
        does not use."""
        ...

    @property
    def shown_name(self) -> str:
        """A description for users."""
        ...
