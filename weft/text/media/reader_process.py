"""The process of `reader_helper.py`: it makes the model's processor, then reads files.

Each message is a line of JSON, and so is its answer. The bytes of files come, and the inputs of the
encoder go, in a file that both processes have open; it is never on a disk that others see. Files
are not trusted: the process has limits on memory and processor time for each of them, and ends when
it exceeds the time.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterable

import msgspec

from weft.config.process import KeptMemory, limit_memory, limit_work, serve
from weft.json_types import JsonObject
from weft.messages.media import MediaKind
from weft.text.media.adjusted import adjusted_within
from weft.text.media.errors import MediaTooLarge
from weft.text.media.families import ProcessorRecipe
from weft.text.media.limits import MediaLimits
from weft.text.media.placing import ReadyMedia, described
from weft.text.media.processor import MediaProcessor
from weft.text.media.reader import read_media

KEPT_BYTES = 1 << 26  # of the memory of one question, for the next: a picture of 1 megapixel
MAX_FAULT_LEN = 2_000  # characters


class ReaderSetup(msgspec.Struct, frozen=True):
    """The first line. Its answer is an empty `ReaderAnswer`."""

    recipe: ProcessorRecipe
    limits: MediaLimits
    file: int  # descriptor of the shared file


class ReaderQuestion(msgspec.Struct, frozen=True):
    kind: MediaKind
    lens: list[int]  # bytes of each file; one after the other in the shared file
    frames_per_s: float
    changes: JsonObject  # the request's, of the processor
    is_long: bool  # else it is refused if it is no short work


class ReaderAnswer(msgspec.Struct, omit_defaults=True):
    # Without the values of its items, which are in the shared file, one after the other.
    media: ReadyMedia | None = None
    error: str = ""
    limit: str = ""  # as in `MediaTooLarge`
    fault: str = ""  # the traceback of an error that is ours


def main() -> None:
    serve(_MediaReader())


class _MediaReader:
    """Answers the set-up, and then each question."""

    def __init__(self) -> None:
        self._setup: ReaderSetup | None = None
        self._processor: MediaProcessor | None = None
        self._memory: KeptMemory | None = None

    def __call__(self, line: bytes) -> bytes:
        answer = self._answer(line)
        if self._memory is not None:
            self._memory.give_back()
        return msgspec.json.encode(answer)

    def _answer(self, line: bytes) -> ReaderAnswer:
        try:
            if self._processor is None:
                self._begin(msgspec.json.decode(line, type=ReaderSetup))
                return ReaderAnswer()
            return self._read(msgspec.json.decode(line, type=ReaderQuestion))
        except MediaTooLarge as exc:
            return ReaderAnswer(error=str(exc), limit=exc.limit)
        except ValueError as exc:
            return ReaderAnswer(error=str(exc))
        except MemoryError:
            os._exit(1)  # the owner knows what it means; nobody knows what the libraries hold
        except Exception:
            return ReaderAnswer(fault=traceback.format_exc()[-MAX_FAULT_LEN:])
        finally:
            limit_work(0.0)

    def _begin(self, setup: ReaderSetup) -> None:
        warnings.simplefilter("ignore")  # a faulty file is reported to its sender
        import PIL.Image  # noqa: F401 (before the memory is limited)

        self._memory = KeptMemory(KEPT_BYTES)
        self._setup = setup
        self._processor = setup.recipe.make()

    def _read(self, question: ReaderQuestion) -> ReaderAnswer:
        assert self._setup is not None
        assert self._processor is not None
        limits = self._setup.limits
        limit_memory(limits.work_bytes(question.kind))
        limit_work(limits.work_s(question.kind))
        if not question.is_long:
            limits = limits.of_short_work()
        processor = self._processor
        if question.changes:
            processor = adjusted_within(processor, question.changes)
        files = _taken(self._setup.file, question.lens)
        made = read_media(processor, limits, question.kind, files, question.frames_per_s)
        bare, arrays = described(question.kind, made)
        write_all(self._setup.file, (array.ravel().view("u1").data for array in arrays))
        return ReaderAnswer(media=bare)


def _taken(file: int, lens: Iterable[int]) -> list[bytes]:
    """The files with these lengths in the shared file."""
    found: list[bytes] = []
    offset = 0
    for length in lens:
        found.append(read_all(file, length, offset))
        offset += length
    return found


def read_all(file: int, length: int, offset: int) -> bytes:
    """`length` bytes from `offset` on. One call reads at most 2 GB, which is more than any file
    or item may have."""
    data = os.pread(file, length, offset)
    if len(data) != length:
        raise OSError("the shared file is shorter than announced")
    return data


def write_all(file: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write pieces one after the other, from the beginning of the shared file on."""
    offset = 0
    for piece in pieces:
        left = memoryview(piece)
        while left:
            written = os.pwrite(file, left, offset)
            left = left[written:]
            offset += written


if __name__ == "__main__":
    main()
