"""The sounds of Qwen2-Audio, prepared for its encoder: log-mel spectrograms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weft.arrays import FloatArray
from weft.config.config_json import require, section, size
from weft.config.model_errors import BadConfig
from weft.json_types import JsonMapping
from weft.messages.media import MediaKind
from weft.text.media.mel import MAX_RATE, MAX_WINDOW, MelBands, MelSpec, log_mel
from weft.text.media.processor import MediaPart, PreparedMedia, SoundsAlone, require_sound_length
from weft.text.media.processor_files import read_extractor

PLACEHOLDER = "<|AUDIO|>"


class Qwen2Audio(SoundsAlone):
    """The `MediaProcessor` of Qwen2-Audio. Values are log-mel spectrograms [bands, frames]."""

    marks: Mapping[MediaKind, str] = {"audio": PLACEHOLDER}
    placeholders: Mapping[MediaKind, str] = {"audio": PLACEHOLDER}

    def __init__(self, config: JsonMapping, extractor: JsonMapping) -> None:
        """`config` is `config.json`, `extractor` the checkpoint's settings of its
        WhisperFeatureExtractor. Raises ModelError if they do not fit together."""
        encoder = section(config, "audio_config")
        num_bands = size(encoder, "num_mel_bins", 128)
        num_positions = size(encoder, "max_source_positions", 1_500)
        self.spec = spec_of_encoder(extractor, num_bands, num_positions)
        self._bands = MelBands(self.spec)

    @property
    def audio_rate(self) -> int:
        return self.spec.rate

    def audio(self, samples: FloatArray) -> PreparedMedia:
        spec = self.spec
        require_sound_length(len(samples), spec.max_samples, spec.rate)
        # The encoder first halves the number of frames, then the number of vectors.
        frames_of_sound = -(-len(samples) // spec.hop)
        num_positions = (frames_of_sound + 1) // 2
        length = num_positions // 2
        if not length:
            raise ValueError(
                f"the sound is too short: its length at {spec.rate:,} samples a second is "
                f"{len(samples):,}; at least {2 * spec.hop + 1:,} samples are needed"
            )
        # The last position also reads the next frame. The encoder reads no frames after that.
        num_frames = min(2 * num_positions + 1, spec.num_frames)
        values = log_mel(samples, spec, self._bands, num_frames)
        part = MediaPart(kind="audio", length=length, grid=None, values=values)
        return PreparedMedia(PLACEHOLDER * length, (part,))


def make(folder: Path, config: JsonMapping) -> Qwen2Audio:
    """The processor of the model in a folder; `config` is its `config.json`. Raises ModelError."""
    return Qwen2Audio(config, read_extractor(folder))


def spec_of_encoder(extractor: JsonMapping, num_bands: int, num_positions: int) -> MelSpec:
    """The spectrograms of a WhisperFeatureExtractor, for an encoder that makes a vector of two
    frames. Raises ModelError if they do not fit together."""
    spec = _read_spec(extractor)
    num_frames = 2 * num_positions
    if (num_bands, num_frames) != (spec.num_bands, spec.num_frames):
        raise BadConfig(
            f"the encoder of sounds reads {num_frames} frames of {num_bands} bands; "
            f"its feature extractor makes {spec.num_frames} of {spec.num_bands}"
        )
    return spec


def _read_spec(extractor: JsonMapping) -> MelSpec:
    """The spectrograms of a WhisperFeatureExtractor. Raises ModelError."""
    require(extractor, "feature_extractor_type", "WhisperFeatureExtractor")
    require(extractor, "dither", 0, 0.0)  # dither is random noise: results would differ
    rate = size(extractor, "sampling_rate", 16_000, most=MAX_RATE)
    hop = size(extractor, "hop_length", 160, most=MAX_WINDOW)
    return MelSpec(
        num_bands=size(extractor, "feature_size", 80),
        rate=rate,
        hop=hop,
        window=size(extractor, "n_fft", 400, most=MAX_WINDOW),
        num_frames=size(extractor, "chunk_length", 30) * rate // hop,
    )
