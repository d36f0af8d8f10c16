"""Decodes sound files to samples: WAV without other packages; FLAC, MP3 and Ogg with the package
soundfile, if it is installed.

The header of a file is checked before the samples are decoded. A too long sound is refused before
its samples are decoded, or while they are.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np

from weft.arrays import FloatArray
from weft.text.media.errors import MediaTooLarge
from weft.text.media.resample import resample
from weft.text.media.wav import is_wav, read_wav

MAX_CHANNELS = 8
RATES = range(4_000, 192_001)  # samples a second
BLOCK = 1 << 16  # frames that are decoded at once
# First bytes of the files that soundfile may read. It can read other formats, which are refused.
STARTS = {b"fLaC": "FLAC", b"OggS": "OGG", b"ID3": "MP3"}
READ = "WAV, FLAC, MP3 and Ogg"


class SoundLimit(NamedTuple):
    """How long a sound may last."""

    max_s: float = 60.0  # the limits of models are lower
    limit: str = "max_audio_s"  # the field of `config.limits.Limits`


ANY_SOUND = SoundLimit()


class Sound(NamedTuple):
    samples: FloatArray  # [n], mono, between -1 and 1
    rate: int  # samples a second


def decode_sound(raw: bytes, rate: int, limit: SoundLimit = ANY_SOUND) -> FloatArray:
    """The samples [n] of a file, mono, `rate` per second. Channels are averaged.

    Raises ValueError, with a message for the client, if the file is not a sound, is damaged or too
    long, or has too many channels or a rate that is not allowed.
    """
    sound = _decoded(raw, limit)
    if not len(sound.samples):
        raise ValueError("the sound is empty")
    if not np.isfinite(sound.samples).all():
        raise ValueError("the sound has samples that are not finite numbers")
    return resample(sound.samples, sound.rate, rate)


def _decoded(raw: bytes, limit: SoundLimit) -> Sound:
    if is_wav(raw):
        wav = read_wav(raw)
        _check(wav.layout.rate, wav.layout.channels, wav.num_frames, limit)
        return Sound(wav.mono(), wav.layout.rate)
    return _by_soundfile(raw, _format(raw), limit)


def _format(raw: bytes) -> str:
    for start, format in STARTS.items():
        if raw.startswith(start):
            return format
    # An MP3 without tags begins with a frame: eleven set bits, then version and layer.
    if len(raw) > 2:
        is_begun = raw[0] == 0xFF and raw[1] & 0xE0 == 0xE0
        has_layer = bool(raw[1] & 0x06)
        if is_begun and has_layer:
            return "MP3"
    raise ValueError(f"the sound has no known format; {READ} are allowed")


def _by_soundfile(raw: bytes, format: str, limit: SoundLimit) -> Sound:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: the C library is missing
        raise ValueError(
            f"the sound is {format}, and this server reads only WAV: the package soundfile is "
            "not installed (pip install soundfile)"
        ) from None

    class Stream(soundfile.SoundFile):  # type: ignore[misc]
        """Is read to its end, whatever length its header states. A file that can be sought is
        sought after each read, to where it already is: this fails where the header lies, and takes
        longer than the decoding of Opus."""

        def seekable(self) -> bool:
            return False

    try:
        with Stream(io.BytesIO(raw)) as file:
            if file.format not in STARTS.values():
                raise ValueError(f"the sound begins as {format}, and is {file.format}")
            return _read(file, limit)
    except soundfile.SoundFileError as exc:
        # The library's own texts are about files on a disk, and about formats that it has not.
        raise ValueError(
            f"the sound cannot be decoded as {format}: it is incomplete, damaged or of a kind that "
            "is not supported"
        ) from exc


def _read(file: Any, limit: SoundLimit) -> Sound:
    """The samples of an open file, read in blocks."""
    _check(file.samplerate, file.channels, 0, limit)
    pieces = []
    num_frames = 0
    while True:
        piece = file.read(BLOCK, dtype="float32", always_2d=True)
        if not len(piece):
            break
        num_frames += len(piece)
        _check(file.samplerate, file.channels, num_frames, limit)
        pieces.append(piece.mean(1))
    samples = np.concatenate(pieces) if pieces else np.empty(0, np.float32)
    return Sound(samples, file.samplerate)


def _check(rate: int, channels: int, num_frames: int, limit: SoundLimit) -> None:
    if rate not in RATES:
        raise ValueError(
            f"the sound has {rate} samples a second; from {RATES[0]} to {RATES[-1]} are allowed"
        )
    if channels > MAX_CHANNELS:
        raise ValueError(f"the sound has {channels} channels; at most {MAX_CHANNELS} are allowed")
    if num_frames > limit.max_s * rate:
        option = "--" + limit.limit.replace("_", "-")
        message = f"the sound lasts more than {limit.max_s:g} s, which {option} allows"
        raise MediaTooLarge(limit.limit, message)
