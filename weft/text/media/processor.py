"""The interface of media processors, which prepare pictures, videos and sounds for a model's
encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeAlias

from weft.arrays import FloatArray
from weft.messages.media import MediaKind
from weft.text.media.errors import MediaError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ITEM_BYTES = 500_000_000  # below the limit of a frame beside a message


def require_sound_length(num_samples: int, most: int, rate: int) -> None:
    """Raise ValueError for a sound that lasts longer than the model takes."""
    if num_samples > most:
        raise ValueError(
            f"the sound lasts {num_samples / rate:.1f} s; the model takes at most {most / rate:g} s"
        )


def require_item_size(num_bytes: int) -> None:
    """Raise `MediaError` if one input of the encoder would have too many bytes."""
    if num_bytes > MAX_ITEM_BYTES:
        raise MediaError(
            f"it is too large for this model, whose encoder would read {num_bytes / 1e6:,.0f} MB "
            f"of it; {MAX_ITEM_BYTES / 1e6:,.0f} MB are allowed"
        )


class MediaPart(NamedTuple):
    """One input of the encoder, and the number of tokens for its vectors in the prompt."""

    kind: MediaKind
    length: int  # tokens from the first to the last placeholder, with the tokens between them
    grid: tuple[int, int, int] | None  # as in `MediaItem`
    values: FloatArray  # float32, in the shape that the family's encoder reads
    time_step: float = 1.0  # as in `MediaItem`
    line_len: int = 0  # as in `MediaItem`
    num_heard: int = 0  # as in `MediaItem`
    seconds: float = 0.0  # as in `MediaItem`


class PreparedMedia(NamedTuple):
    """One picture, video or sound, prepared for the prompt and the encoder."""

    text: str  # replaces the mark of the chat template; contains all placeholders
    parts: tuple[MediaPart, ...]  # in the order of their placeholders in `text`


Knob: TypeAlias = bool | int | float  # a setting that can be changed: a switch or a size


class MediaProcessor(Protocol):
    """The processor of one model. Each call is a pure function of its arguments; calls may run in
    several threads at once."""

    # The text that the chat template writes for one picture, video or sound, by the kinds that the
    # model takes.
    marks: Mapping[MediaKind, str]
    # The token (as text) whose positions in the prompt get the vectors of the encoder.
    placeholders: Mapping[MediaKind, str]

    def image(self, image: Image) -> PreparedMedia:
        """Prepare a decoded picture (RGB). Raises ValueError if the model cannot take it, for
        example because it is too narrow."""
        ...

    def video(self, frames: Sequence[Image], frames_per_s: float) -> PreparedMedia:
        """Prepare a video: frames of one size (RGB), `frames_per_s` per second."""
        ...

    def audio(self, samples: FloatArray) -> PreparedMedia:
        """Prepare a sound: samples [n] between -1 and 1, mono, `audio_rate` per second."""
        ...

    @property
    def audio_rate(self) -> int:
        """Samples per second that `audio` expects; 0: the model takes no sound."""
        ...

    @property
    def knobs(self) -> Mapping[str, Knob]:
        """The current values of the settings that can be changed, by their transformers names."""
        ...

    def adjusted(self, changes: Mapping[str, Knob]) -> MediaProcessor:
        """The processor with changed settings, whose types stay the same. Raises ValueError if they
        do not fit together."""
        ...


class WithoutKnobs:
    """A processor of which nothing can be changed."""

    @property
    def knobs(self) -> Mapping[str, Knob]:
        return {}

    def adjusted(self, changes: Mapping[str, Knob]) -> Self:
        assert not changes, "it has no knobs"
        return self


class PicturesAlone:
    """What the processors of models that only see pictures have in common: they refuse videos and
    sounds."""

    @property
    def audio_rate(self) -> int:
        return 0

    def video(self, frames: Sequence[Image], frames_per_s: float) -> PreparedMedia:
        raise ValueError("the model takes no videos")

    def audio(self, samples: FloatArray) -> PreparedMedia:
        raise ValueError("the model takes no audio")


class SoundsAlone(WithoutKnobs):
    """What the processors of models that only hear have in common: they refuse pictures and videos,
    and have no knobs."""

    def image(self, image: Image) -> PreparedMedia:
        raise ValueError("the model takes no images")

    def video(self, frames: Sequence[Image], frames_per_s: float) -> PreparedMedia:
        raise ValueError("the model takes no videos")
