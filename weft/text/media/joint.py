"""A processor for pictures and videos and one for sounds, as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from weft.arrays import FloatArray
from weft.messages.media import MediaKind
from weft.text.media.processor import Knob, MediaProcessor, PreparedMedia

if TYPE_CHECKING:
    from PIL.Image import Image


class SeesAndHears:
    """The `MediaProcessor` of a model with two encoders. The knobs are those of `sees`."""

    def __init__(self, sees: MediaProcessor, hears: MediaProcessor) -> None:
        self.marks: Mapping[MediaKind, str] = {**sees.marks, **hears.marks}
        self.placeholders: Mapping[MediaKind, str] = {**sees.placeholders, **hears.placeholders}
        self._sees = sees
        self._hears = hears

    @property
    def audio_rate(self) -> int:
        return self._hears.audio_rate

    def image(self, image: Image) -> PreparedMedia:
        return self._sees.image(image)

    def video(self, frames: Sequence[Image], frames_per_s: float) -> PreparedMedia:
        return self._sees.video(frames, frames_per_s)

    def audio(self, samples: FloatArray) -> PreparedMedia:
        return self._hears.audio(samples)

    @property
    def knobs(self) -> Mapping[str, Knob]:
        return self._sees.knobs

    def adjusted(self, changes: Mapping[str, Knob]) -> SeesAndHears:
        return SeesAndHears(self._sees.adjusted(changes), self._hears)
