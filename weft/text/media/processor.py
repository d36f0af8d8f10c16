"""What a family of models makes of a picture, a video or a sound before its encoder reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from weft.arrays import FloatArray
from weft.messages.media import MediaKind

if TYPE_CHECKING:
    from PIL.Image import Image


class MediaPart(NamedTuple):
    """What the encoder reads at once, and the placeholder tokens that its vectors take."""

    kind: MediaKind
    length: int  # placeholder tokens, one behind the other, with what stands between them
    grid: tuple[int, int, int] | None  # as that of `MediaItem`
    values: FloatArray  # float32, in the shape that the family's encoder reads
    time_step: float = 1.0
    line_len: int = 0  # as that of `MediaItem`


class PreparedMedia(NamedTuple):
    """What stands in the prompt for one picture, video or sound."""

    text: str  # in the place of the mark that the chat template writes, with all placeholders
    parts: tuple[MediaPart, ...]  # in the order of their placeholders in `text`


Knob: TypeAlias = bool | int | float  # a size, or a switch, that may be changed


class MediaProcessor(Protocol):
    """That of one model. Every call is a pure function of its arguments; calls may run in several
    threads at once."""

    # What the chat template writes for one picture, video or sound; a kind that is not there is
    # not taken by the model.
    marks: Mapping[MediaKind, str]
    # The token (as text) whose runs stand for vectors.
    placeholders: Mapping[MediaKind, str]

    def image(self, image: Image) -> PreparedMedia:
        """Of a decoded picture (RGB). Raises ValueError for one that the model cannot take, such
        as one that is too narrow."""
        ...

    def video(self, frames: Sequence[Image], frames_per_s: float) -> PreparedMedia:
        """Of frames of the same size (RGB), `frames_per_s` of them a second."""
        ...

    def audio(self, samples: FloatArray) -> PreparedMedia:
        """Of samples [n] between -1 and 1, in mono, `audio_rate` of them a second."""
        ...

    @property
    def audio_rate(self) -> int:
        """Samples of a second that `audio` wants; 0: the model takes no sound."""
        ...

    @property
    def knobs(self) -> Mapping[str, Knob]:
        """What may be changed of it, by the names of transformers, as it is."""
        ...

    def adjusted(self, changes: Mapping[str, Knob]) -> MediaProcessor:
        """The same with other knobs, each of the kind that it was. Raises ValueError for those that
        do not fit together."""
        ...
