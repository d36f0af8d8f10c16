"""The forms of requests about speech, and of their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec


@dataclass(kw_only=True)
class SpeechForm:
    """What a form asks for, beside its file."""

    task: str
    model: str | None
    language: str  # a code; "": the model finds out
    prompt: str
    response_format: str
    temperature: float | None  # None: 0, and more if the answer looks wrong
    granularities: tuple[str, ...]  # of times in verbose_json
    stream: bool
    user: str
    # The fields of every body that makes a request to the engine:
    priority: int | None = None
    service_tier: str | None = None
    timeout_ms: int | None = None
    ttft_ms: int | None = None

    @property
    def wants_words(self) -> bool:
        return "word" in self.granularities


class Duration(msgspec.Struct, kw_only=True, tag="duration"):
    seconds: float


class TokenUsage(msgspec.Struct, kw_only=True, tag="tokens"):
    """Of a model that answers a prompt about the sound."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


Usage: TypeAlias = Duration | TokenUsage


class Transcription(msgspec.Struct, kw_only=True):
    text: str
    usage: Usage


class TranscribedSegment(msgspec.Struct, kw_only=True):
    id: int
    seek: int  # where its window begins, in hundredths of a second
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscribedWord(msgspec.Struct, kw_only=True):
    word: str
    start: float
    end: float


class VerboseTranscription(msgspec.Struct, kw_only=True):
    task: str
    language: str
    duration: float
    text: str
    usage: Duration
    segments: list[TranscribedSegment] | msgspec.UnsetType = msgspec.UNSET
    words: list[TranscribedWord] | msgspec.UnsetType = msgspec.UNSET


class TextDelta(msgspec.Struct, kw_only=True):
    delta: str
    type: str = "transcript.text.delta"


class TextDone(msgspec.Struct, kw_only=True):
    text: str
    usage: Usage
    type: str = "transcript.text.done"
