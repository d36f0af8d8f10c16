"""What is known of every encoder of pictures, videos or sounds (a tower) before it is built.

`config/families/` says which reader makes one of a `config.json` (`Family.tower`), and
`models/vision/towers.py` which class computes it.
"""

from __future__ import annotations

from typing import Protocol

from weft.config.media import MediaRules


class TowerSpec(Protocol):
    """A frozen dataclass for each kind of tower."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What it takes: image, video, audio."""
        ...

    @property
    def rules(self) -> MediaRules:
        """What the scheduler must know of its tokens."""
        ...

    @property
    def num_parameters(self) -> int:
        """Its weights, with its projection to the decoder, without biases and norms."""
        ...

    @property
    def num_work_floats(self) -> int:
        """Numbers of float32 that live while the largest usual input is encoded."""
        ...

    @property
    def unread(self) -> tuple[str, ...]:
        """Beginnings of names, within the base model, of tensors that checkpoints have and it does
        not compute with."""
        ...

    @property
    def told(self) -> str:
        """What it is, for people."""
        ...
