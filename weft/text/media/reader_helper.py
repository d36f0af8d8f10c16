"""Reads the files of requests in helper processes, which have limits and can be ended.

    front                      shared file                process
    bytes of the file ──────▶ ░░░░░░░░░░░░ ──────▶ decode, resize, normalize
    inputs of the encoder ◀── ░░░░░░░░░░░░ ◀────── values

The inputs of an encoder are large (12 bytes for each pixel): they pass through memory that both
processes have open, and are copied once on each side. No code of a decoder runs in this process.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from tempfile import TemporaryFile

import msgspec

from weft.config.helper import Helper, HelperFailed
from weft.json_types import JsonObject
from weft.messages.media import MediaKind
from weft.text.helpers import HelperPool
from weft.text.media.errors import MediaError, MediaTooLarge
from weft.text.media.families import ProcessorRecipe
from weft.text.media.limits import MediaLimits
from weft.text.media.placing import ReadyMedia, with_values
from weft.text.media.reader_process import (
    ReaderAnswer,
    ReaderQuestion,
    ReaderSetup,
    read_all,
    write_all,
)
from weft.text.media.sources import Raw

NUM_PROCESSES = 2
KEPT_BYTES = 1 << 25  # memory of a shared file that stays for the next question
FLOAT_BYTES = 4


class MediaReaders:
    """The reading processes of one server. For one event loop."""

    def __init__(self, recipe: ProcessorRecipe, limits: MediaLimits) -> None:
        self._limits = limits
        self.processes = [_ReadingProcess(recipe, limits) for _ in range(NUM_PROCESSES)]
        self._pool = HelperPool(self.processes, "the decoder of media")
        self._pool.start()

    async def read(
        self, kind: MediaKind, raw: Raw, changes: JsonObject, *, is_long: bool
    ) -> ReadyMedia:
        """`reader.read_media`, ready for the engine. If the caller is cancelled, the work ends.
        Short work that turns out to be long waits for a turn of long work.

        Raises ValueError, with a message for the client, and `Busy`.
        """
        try:
            return await self._pool.run(
                lambda process: process.read(kind, raw, changes, is_long=is_long), is_long=is_long
            )
        except MediaTooLarge:
            if is_long:
                raise
        except HelperFailed as exc:
            raise self._refused(exc, kind) from None
        # Its head promised a smaller picture.
        return await self.read(kind, raw, changes, is_long=True)

    def _refused(self, exc: HelperFailed, kind: MediaKind) -> MediaError:
        if exc.out_of_time:
            work_s = self._limits.work_s(kind)
            return MediaError(f"it takes more than {work_s:g} s of a processor to read")
        num_bytes = self._limits.work_bytes(kind)
        return MediaError(f"it takes more than {num_bytes / 1e6:,.0f} MB of memory to read")

    def close(self) -> None:
        """End the processes. `read` raises `Busy` then and afterwards."""
        self._pool.close()


class _ReadingProcess:
    """One process, and the file that it shares with this one."""

    def __init__(self, recipe: ProcessorRecipe, limits: MediaLimits) -> None:
        self._limits = limits
        self._file = _shared_file()
        setup = msgspec.json.encode(ReaderSetup(recipe, limits, self._file))
        module = "weft.text.media.reader_process"
        self.helper = Helper(module, setup, _check_setup, files=(self._file,))

    def start(self) -> None:
        self.helper.start()

    def kill(self) -> None:
        self.helper.kill()

    def close(self) -> None:
        self.helper.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def read(self, kind: MediaKind, raw: Raw, changes: JsonObject, *, is_long: bool) -> ReadyMedia:
        write_all(self._file, raw.files)
        lens = [len(file) for file in raw.files]
        question = ReaderQuestion(kind, lens, raw.frames_per_s, changes, is_long)
        try:
            line = self.helper.ask(msgspec.json.encode(question), self._limits.work_s(kind))
            bare = _answer_in(line).media
            assert bare is not None
            return with_values(bare, self._values(bare))
        finally:
            if os.fstat(self._file).st_size > KEPT_BYTES:
                os.truncate(self._file, 0)

    def _values(self, bare: ReadyMedia) -> list[bytes]:
        found: list[bytes] = []
        offset = 0
        for item in bare.items:
            length = FLOAT_BYTES * math.prod(item.shape)
            found.append(read_all(self._file, length, offset))
            offset += length
        return found


class ReaderFault(Exception):
    """The reading process has failed by our own fault; the message is its traceback."""


def _answer_in(line: bytes) -> ReaderAnswer:
    """Raises `MediaError` for an error of the client, and `ReaderFault` for one of ours."""
    answer = msgspec.json.decode(line, type=ReaderAnswer)
    if answer.fault:
        raise ReaderFault(answer.fault)
    if answer.limit:
        raise MediaTooLarge(answer.limit, answer.error)
    if answer.error:
        raise MediaError(answer.error)
    return answer


def _check_setup(line: bytes) -> None:
    answer = msgspec.json.decode(line, type=ReaderAnswer)
    if answer.fault or answer.error:
        raise ReaderFault(answer.fault or answer.error)


def _shared_file() -> int:
    """A file in memory without a name, or, where the system has none, on disk."""
    with suppress(AttributeError, OSError):
        return os.memfd_create("weft-media")
    with TemporaryFile() as file:
        return os.dup(file.fileno())
