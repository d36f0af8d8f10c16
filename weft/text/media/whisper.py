"""The sounds of Whisper, prepared for its encoder: log-mel spectrograms of windows of 30 s."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from weft.arrays import FloatArray
from weft.config.config_json import size
from weft.json_types import JsonMapping
from weft.messages.media import MediaItem, MediaKind
from weft.text.media.mel import MelBands, log_mel
from weft.text.media.processor import MediaPart, PreparedMedia, SoundsAlone
from weft.text.media.processor_files import read_extractor
from weft.text.media.qwen2_audio import spec_of_encoder

BEGIN = "<|startoftranscript|>"


class Whisper(SoundsAlone):
    """The `MediaProcessor` of Whisper. Values are log-mel spectrograms [bands, frames] of the whole
    sound, padded with silence to at least one window; `window` cuts them."""

    # The prompt itself has the token with which every transcript begins.
    marks: Mapping[MediaKind, str] = {"audio": BEGIN}
    placeholders: Mapping[MediaKind, str] = {"audio": BEGIN}

    def __init__(self, config: JsonMapping, extractor: JsonMapping) -> None:
        """`config` is `config.json`, `extractor` the checkpoint's settings of its
        WhisperFeatureExtractor. Raises ModelError if they do not fit together."""
        num_bands = size(config, "num_mel_bins", 80)
        self.num_positions = size(config, "max_source_positions", 1_500)
        self.spec = spec_of_encoder(extractor, num_bands, self.num_positions)
        self._bands = MelBands(self.spec)

    @property
    def audio_rate(self) -> int:
        return self.spec.rate

    def audio(self, samples: FloatArray) -> PreparedMedia:
        spec = self.spec
        num_frames = max(spec.num_frames, len(samples) // spec.hop)
        values = log_mel(samples, spec._replace(num_frames=num_frames), self._bands, num_frames)
        part = MediaPart(
            kind="audio",
            length=0,
            grid=None,
            values=values,
            num_heard=self.num_positions,
            seconds=len(samples) / spec.rate,
        )
        return PreparedMedia(BEGIN, (part,))


def window(sound: MediaItem, first: int) -> MediaItem:
    """The window of a long sound that begins with frame `first`, padded with zeros after its end,
    as transformers pads it."""
    num_bands, num_frames = sound.shape
    size = 2 * sound.num_heard
    if not first and num_frames == size:
        return sound
    values = np.frombuffer(sound.values, dtype="<f4").reshape(num_bands, num_frames)
    cut = np.zeros((num_bands, size), dtype="<f4")
    own = values[:, first : first + size]
    cut[:, : own.shape[1]] = own
    digest = hashlib.sha256(f"window of {sound.num_heard} {cut.shape}\n".encode())
    digest.update(cut.data)
    return replace(sound, digest=digest.digest(), shape=cut.shape, values=cut.tobytes())


def make(folder: Path, config: JsonMapping) -> Whisper:
    """The processor of the model in a folder; `config` is its `config.json`. Raises ModelError."""
    return Whisper(config, read_extractor(folder))
