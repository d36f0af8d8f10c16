"""The sounds of Voxtral, prepared for its encoder: log-mel spectrograms of windows, as many as the
sound needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weft.arrays import FloatArray
from weft.config.config_json import section, size
from weft.config.vision.stacked import StackedSpec, voxtral
from weft.json_types import JsonMapping
from weft.messages.media import MediaKind
from weft.text.media.mel import MelBands, log_mel
from weft.text.media.processor import MediaPart, PreparedMedia, SoundsAlone
from weft.text.media.processor_files import read_extractor
from weft.text.media.qwen2_audio import spec_of_encoder

BEGIN = "[BEGIN_AUDIO]"
PLACEHOLDER = "[AUDIO]"


class Voxtral(SoundsAlone):
    """The `MediaProcessor` of Voxtral. Values are log-mel spectrograms [bands, frames] of a window
    each, the last of them with silence up to its end."""

    marks: Mapping[MediaKind, str] = {"audio": PLACEHOLDER}
    placeholders: Mapping[MediaKind, str] = {"audio": PLACEHOLDER}

    def __init__(self, tower: StackedSpec, extractor: JsonMapping) -> None:
        """`extractor` is the checkpoint's settings of its WhisperFeatureExtractor. Raises
        ModelError if it does not fit the encoder."""
        encoder = tower.encoder
        self.spec = spec_of_encoder(extractor, encoder.num_bands, encoder.num_positions)
        self._num_tokens = tower.num_tokens
        self._bands = MelBands(self.spec)

    @property
    def audio_rate(self) -> int:
        return self.spec.rate

    def audio(self, samples: FloatArray) -> PreparedMedia:
        spec = self.spec
        num_windows = max(-(-len(samples) // spec.max_samples), 1)
        num_frames = num_windows * spec.num_frames
        loudness = log_mel(samples, spec._replace(num_frames=num_frames), self._bands, num_frames)
        parts = [
            MediaPart(
                kind="audio",
                length=self._num_tokens,
                grid=None,
                values=loudness[:, first : first + spec.num_frames],
            )
            for first in range(0, num_frames, spec.num_frames)
        ]
        return PreparedMedia(BEGIN + PLACEHOLDER * self._num_tokens * num_windows, tuple(parts))


def make(folder: Path, config: JsonMapping) -> Voxtral:
    """The processor of the model in a folder; `config` is its `config.json`. Raises ModelError."""
    text = section(config, "text_config")
    return Voxtral(voxtral(config, size(text, "hidden_size", 3_072)), read_extractor(folder))
