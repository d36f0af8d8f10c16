"""A tiny random Whisper with all the files of a checkpoint, made and saved by transformers."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import AddedToken

from tests.text.tokens import EOS, byte_backend
from weft.arrays import FloatArray

RATE = 16_000
SECONDS = 2  # of a window
NUM_POSITIONS = 50 * SECONDS
LANGUAGES = ("en", "de", "fr")
NAMES = (
    "<|startoftranscript|>",
    *(f"<|{name}|>" for name in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
    *(f"<|{0.02 * place:.2f}|>" for place in range(NUM_POSITIONS + 1)),
)
FIRST = 260  # the id of the first of these names
IDS = {name: FIRST + index for index, name in enumerate(NAMES)}
BEGIN = IDS["<|startoftranscript|>"]
TRANSCRIBE = IDS["<|transcribe|>"]
SUPPRESSED = [3, 5, BEGIN, IDS["<|startofprev|>"], IDS["<|nospeech|>"]]
NO_TIMESTAMPS = IDS["<|notimestamps|>"]
SIZES: dict[str, Any] = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "num_mel_bins": 16,
    "max_source_positions": NUM_POSITIONS,
    "max_target_positions": 96,
    "vocab_size": FIRST + len(NAMES),
}


class SpeechModel(NamedTuple):
    """A saved model, and what transformers computes with."""

    folder: Path
    model: Any
    processor: Any

    def features(self, samples: FloatArray) -> torch.Tensor:
        """[1, bands, frames] of a sound of at most one window."""
        made = self.processor.feature_extractor(samples, sampling_rate=RATE, return_tensors="pt")
        features: torch.Tensor = made.input_features
        return features


def make(folder: Path, seed: int = 7, **sizes: Any) -> SpeechModel:
    """`sizes` replace those of `SIZES`."""
    backend = byte_backend()
    backend.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<eos>", eos_token="<eos>", pad_token="<eos>"
    )
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    config = transformers.WhisperConfig(
        **{**SIZES, **sizes},
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        decoder_start_token_id=BEGIN,
        attn_implementation="eager",
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(seed)
    model = transformers.WhisperForConditionalGeneration(config)
    randomize(model, seed)
    model.generation_config = generation_config(config.max_target_positions)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    extractor.save_pretrained(folder)
    return SpeechModel(folder, model, Processor(tokenizer, extractor))


class Processor(NamedTuple):
    tokenizer: Any
    feature_extractor: Any


def generation_config(max_length: int) -> Any:
    return transformers.GenerationConfig(
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        decoder_start_token_id=BEGIN,
        is_multilingual=True,
        lang_to_id={f"<|{name}|>": IDS[f"<|{name}|>"] for name in LANGUAGES},
        task_to_id={"transcribe": TRANSCRIBE, "translate": IDS["<|translate|>"]},
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=IDS["<|startofprev|>"],
        max_initial_timestamp_index=50,
        max_length=max_length,
        suppress_tokens=SUPPRESSED,
        begin_suppress_tokens=[32, EOS],
        alignment_heads=[[1, 0], [2, 3]],
        return_timestamps=False,
    )


def randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.25 * noise)
    model.eval()


def sound(length: int, seed: int = 0) -> FloatArray:
    """Samples of a sound that changes with time."""
    rng = np.random.default_rng((length, seed))
    times = np.arange(length) / RATE
    pitch = 200 + 150 * np.sin(2 * np.pi * (1.3 + seed) * times)
    tone = np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
    loudness = 0.3 + 0.3 * np.sin(2 * np.pi * 2.1 * times + seed)
    return (loudness * tone + 0.02 * rng.standard_normal(length)).astype(np.float32)


def wav(samples: FloatArray, rate: int = RATE, channels: int = 1) -> bytes:
    """A file with these samples, in 16 bits."""
    whole = np.round(np.clip(samples, -1, 1) * 32_767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(np.repeat(whole, channels).tobytes())
    return file.getvalue()


def heard(samples: FloatArray) -> FloatArray:
    """The samples that are read from `wav(samples)`."""
    whole = np.round(np.clip(samples, -1, 1) * 32_767)
    return (whole / 32_768).astype(np.float32)
