from __future__ import annotations

import contextlib
import io
import struct
import sys
import tracemalloc
import wave
from typing import Any

import numpy as np
import pytest

from weft.arrays import FloatArray
from weft.text.media.resample import resample
from weft.text.media.sound import decode_sound

soundfile: Any = pytest.importorskip("soundfile")

RATE = 16_000
TONE = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE // 4) / RATE)  # a quarter of a second


def wav_bytes(
    data: bytes,
    *,
    kind: int = 1,
    channels: int = 1,
    rate: int = RATE,
    bits: int = 16,
    said: int | None = None,
    frame_bytes: int | None = None,
) -> bytes:
    """A WAV file; `said` is what it says of the length of its samples."""
    if frame_bytes is None:
        frame_bytes = channels * bits // 8
    layout = struct.pack(
        "<HHIIHH", kind, channels, rate, rate * frame_bytes % 2**32, frame_bytes, bits
    )
    said = len(data) if said is None else said
    body = b"WAVEfmt " + struct.pack("<I", 16) + layout + b"data" + struct.pack("<I", said) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def pcm16(samples: Any) -> bytes:
    return np.round(np.asarray(samples) * 32767).astype("<i2").tobytes()


def by_soundfile(samples: Any, rate: int, format: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


def test_wav_is_read_as_the_standard_library_writes_it() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes(pcm16(TONE))
    samples = decode_sound(file.getvalue(), RATE)
    assert samples.dtype == np.float32
    np.testing.assert_array_equal(samples * 32768, np.frombuffer(pcm16(TONE), "<i2"))


@pytest.mark.parametrize("format", ["WAV", "WAVEX", "RF64"])
@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_every_kind_of_wav_is_what_soundfile_reads(format: str, subtype: str) -> None:
    both = np.stack([TONE, -TONE / 2], 1)
    raw = by_soundfile(both, RATE, format, subtype)
    expected, _ = soundfile.read(io.BytesIO(raw), dtype="float32", always_2d=True)
    np.testing.assert_array_equal(decode_sound(raw, RATE), expected.mean(1))


@pytest.mark.parametrize("format", ["FLAC", "OGG", "MP3"])
def test_formats_of_soundfile_are_read_with_it(format: str) -> None:
    raw = by_soundfile(np.stack([TONE, TONE], 1), RATE, format)
    samples = decode_sound(raw, RATE)
    assert len(samples) >= len(TONE)
    assert np.abs(samples[500 : len(TONE) - 500] - TONE[500:-500]).max() < 0.02


def test_without_soundfile_its_formats_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = by_soundfile(TONE, RATE, "FLAC")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ValueError, match=r"FLAC.*pip install soundfile"):
        decode_sound(raw, RATE)
    assert len(decode_sound(wav_bytes(pcm16(TONE)), RATE)) == len(TONE)


def test_a_sound_of_unknown_length_ends_with_its_file() -> None:
    for said in (0xFFFFFFFF, 0x7FFFFFFF - 36):
        raw = wav_bytes(pcm16(TONE) + b"\0", said=said)  # a frame is cut off
        assert len(decode_sound(raw, RATE)) == len(TONE)


LONG = by_soundfile(TONE, RATE, "RF64", "PCM_16")
LONG_SIZE = LONG.index(b"ds64") + 16  # where it states the bytes of its samples


def stating(num_bytes: int) -> bytes:
    return LONG[:LONG_SIZE] + struct.pack("<Q", num_bytes) + LONG[LONG_SIZE + 8 :]


def test_the_length_of_a_sound_may_have_64_bits() -> None:
    for said in (0, 2**64 - 1):  # unknown
        assert len(decode_sound(stating(said), RATE)) == len(TONE)
    assert len(decode_sound(stating(100), RATE)) == 50
    other_program = b"BW64" + LONG[4:]
    assert len(decode_sound(other_program, RATE)) == len(TONE)


@pytest.mark.parametrize("length", [0, 2**36 - 1])
def test_a_flac_file_is_read_to_its_end_whatever_length_it_states(length: int) -> None:
    raw = bytearray(by_soundfile(TONE, RATE, "FLAC"))
    # Its head states the number of frames in 36 bits. 0: the writer did not know it.
    raw[21] = raw[21] & 0xF0 | length >> 32
    raw[22:26] = struct.pack(">I", length % 2**32)
    assert len(decode_sound(bytes(raw), RATE)) == len(TONE)


def test_a_file_is_never_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    def seek(*_: Any) -> int:
        raise AssertionError("the decoder of Opus takes longer to seek than to decode")

    monkeypatch.setattr(soundfile.SoundFile, "seek", seek)
    assert len(decode_sound(by_soundfile(TONE, RATE, "OGG", "OPUS"), RATE)) == len(TONE)


def test_another_rate_is_resampled() -> None:
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(11_025) / 44_100)
    samples = decode_sound(wav_bytes(pcm16(tone), rate=44_100), RATE)
    assert len(samples) == len(TONE)
    np.testing.assert_allclose(samples[100:-100], TONE[100:-100], atol=1e-4)


MP3 = by_soundfile(np.tile(TONE, 8), RATE, "MP3")
NOISY_MP3 = MP3[:500] + np.random.default_rng(0).bytes(3_000) + MP3[500:]
HOSTILE = {
    "nothing": (b"", "no known format"),
    "text": (b"<svg></svg>", "no known format"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(64), "no known format"),
    "header alone": (b"RIFF\x04\0\0\0WAVE", "has no samples"),
    "samples first": (
        b"RIFF\x04\0\0\0WAVEdata\x04\0\0\0abcd",
        "before it says what they are",
    ),
    "short header": (b"RIFF\x04\0\0\0WAVEfmt \x04\0\0\0abcd", "does not say what"),
    "no frame": (wav_bytes(b""), "is empty"),
    "cut off": (wav_bytes(pcm16(TONE), said=1_000_000), "cut off"),
    "cut off, 64 bits": (stating(2**40), "says 1099511627776 bytes of samples, and has 8000"),
    "no 64 bits": (b"RF64\xff\xff\xff\xffWAVEds64\x04\0\0\0abcd", "does not say them"),
    "half a frame": (wav_bytes(b"\0" * 3), "not whole frames"),
    "mu-law": (wav_bytes(bytes(100), kind=7, bits=8), "kind 7 with 8 bits"),
    "12 bits": (wav_bytes(bytes(120), bits=12), "kind 1 with 12 bits"),
    "no channel": (wav_bytes(bytes(100), channels=0), "0 channels"),
    "many channels": (wav_bytes(bytes(18), channels=9), "9 channels"),
    "lying frames": (wav_bytes(bytes(100), frame_bytes=4), "take 4 bytes"),
    "no rate": (wav_bytes(bytes(100), rate=0), "0 samples a second"),
    "high rate": (wav_bytes(bytes(100), rate=4_000_000_000), "4000000000 samples a second"),
    "long": (wav_bytes(bytes(4_000 * 61), bits=8, rate=4_000), "more than 60 s"),
    "not a number": (
        wav_bytes(struct.pack("<3f", 0, np.nan, 0), kind=3, bits=32),
        "not finite",
    ),
    "infinite": (wav_bytes(struct.pack("<d", 1e300), kind=3, bits=64), "not finite"),
    "flac of noise": (b"fLaC" + bytes(range(256)) * 4, "cannot be decoded as FLAC"),
    "ogg of noise": (b"OggS" + bytes(range(256)) * 4, "cannot be decoded as OGG"),
    "noise within mp3": (NOISY_MP3, "cannot be decoded as MP3: it is incomplete, damaged or"),
    "header of an mp3 alone": (MP3[:4], "cannot be decoded as MP3: it is incomplete, damaged or"),
    "mp3 of noise": (b"\xff\xfb" + bytes(range(256)) * 4, "MP3|empty"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_sentence(name: str) -> None:
    raw, message = HOSTILE[name]
    with pytest.raises(ValueError, match=message) as caught:
        decode_sound(raw, RATE)
    assert "\n" not in str(caught.value)
    assert "object at" not in str(caught.value)


def test_every_cut_and_every_changed_byte_gives_a_sound_or_an_error() -> None:
    rng = np.random.default_rng(0)
    files = [wav_bytes(pcm16(TONE[:400]))]
    files += [by_soundfile(TONE[:2000], RATE, format) for format in ("FLAC", "OGG", "MP3")]
    for raw in files:
        for _ in range(60):
            damaged = bytearray(raw[: rng.integers(1, len(raw) + 1)])
            for place in rng.integers(0, min(len(damaged), 200), 3):
                damaged[place] = rng.integers(256)
            with contextlib.suppress(ValueError):
                assert np.isfinite(decode_sound(bytes(damaged), RATE)).all()


def test_a_long_sound_in_few_bytes_takes_little_memory() -> None:
    raw = by_soundfile(np.zeros((RATE * 600, 2), np.int16), RATE, "FLAC")
    assert len(raw) < 200_000
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than 60 s"):
        decode_sound(raw, RATE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


RATES = [(44_100, RATE), (48_000, RATE), (8_000, RATE), (RATE, 44_100), (22_049, RATE)]


@pytest.mark.parametrize(("rate", "wanted"), RATES)
def test_resampling_keeps_low_tones(rate: int, wanted: int) -> None:
    for hz in (100, 1_000, 0.88 * min(rate, wanted) / 2):
        tone = sine(hz, rate, rate // 2)
        there = resample(tone, rate, wanted)
        assert len(there) == -(-len(tone) * wanted // rate)
        expected = sine(hz, wanted, len(there))
        edge = wanted // 20  # what lies before and behind the sound is silence
        np.testing.assert_allclose(there[edge:-edge], expected[edge:-edge], atol=5e-6)


@pytest.mark.parametrize("rate", [44_100, 48_000, 192_000])
def test_resampling_silences_tones_that_the_lower_rate_cannot_hold(rate: int) -> None:
    for hz in (8_000, 9_000, 15_900):
        there = resample(sine(hz, rate, rate // 4), rate, RATE)
        assert np.abs(there[800:-800]).max() < 1e-5


def test_resampling_a_short_sound() -> None:
    assert len(resample(np.zeros(0, np.float32), 8_000, RATE)) == 0
    np.testing.assert_allclose(resample(np.ones(1, np.float32), 48_000, RATE), [0.31], atol=0.01)


def sine(hz: float, rate: int, count: int) -> FloatArray:
    return np.sin(2 * np.pi * hz * np.arange(count) / rate).astype(np.float32)
