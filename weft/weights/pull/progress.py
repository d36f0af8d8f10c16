"""How far a pull is: bytes of all files together, the rate of the last seconds, and the time that
is left. Reads no clock of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.config.amounts import size
from weft.observe.log import EventLog
from weft.weights.pull.listing import HubFile
from weft.weights.pull.names import HubName
from weft.weights.pull.pull import PullWatcher
from weft.weights.pull.transfer import Part

WINDOW_S = 10.0  # of the rate
LOG_S = 10.0  # between two lines in the log

log = EventLog("pull")


class Progress(NamedTuple):
    done_bytes: int
    total_bytes: int
    rate: float  # bytes per second; 0: not known
    is_checking: bool = False  # all bytes are here; digests are computed

    @property
    def left_s(self) -> float | None:
        """Seconds until all bytes are here; None: not known."""
        if not self.rate:
            return None
        return (self.total_bytes - self.done_bytes) / self.rate

    @property
    def line(self) -> str:
        text = f"{size(self.done_bytes)} of {size(self.total_bytes)}"
        if self.total_bytes:
            text = f"{100 * self.done_bytes // self.total_bytes:3d} %  {text}"
        if self.is_checking:
            return f"{text}, checking"
        if self.left_s is not None and self.done_bytes < self.total_bytes:
            text += f", {size(self.rate)}/s, {duration(self.left_s)} left"
        return text


def duration(seconds: float) -> str:
    """A time as a text: 45 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3_600} h {whole % 3_600 // 60:02} min"


class ProgressWatcher(PullWatcher):
    """Adds up the files of a pull. `show` gets each progress, and `say` each line; one thread at a
    time calls them."""

    def __init__(
        self,
        show: Callable[[Progress], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.name: HubName | None = None  # with the chosen type, when the files are known
        self.files: Sequence[HubFile] = ()
        self._show = show
        self._say = say
        self._clock = clock
        self._done: dict[str, int] = {}  # by etag
        self._checking: set[str] = set()
        self._times: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def begins(self, name: HubName, files: Sequence[HubFile]) -> None:
        self.name = name
        self.files = files

    def at(self, part: Part, num_bytes: int) -> None:
        with self._lock:
            is_first = part.file.etag not in self._done
            came = num_bytes - self._done.get(part.file.etag, 0)
            self._done[part.file.etag] = num_bytes
            if is_first or came < 0:  # what was here before did not come now
                self._times = deque((at, done + came) for at, done in self._times)
            self._show(self._progress())

    def told(self, line: str) -> None:
        with self._lock:
            self._say(line)

    def checking(self, part: Part) -> None:
        with self._lock:
            self._checking.add(part.file.etag)
            self._show(self._progress())

    def _progress(self) -> Progress:
        done = sum(self._done.values())
        total = sum({file.etag: file.num_bytes for file in self.files}.values())
        now = self._clock()
        self._times.append((now, done))
        while len(self._times) > 2 and now - self._times[1][0] > WINDOW_S:
            self._times.popleft()
        began, at_begin = self._times[0]
        rate = 0.0
        if now > began:
            rate = max(done - at_begin, 0) / (now - began)
        return Progress(done, total, rate, done == total and bool(self._checking))


def log_watcher() -> ProgressWatcher:
    """A watcher that writes to the log, for commands that fetch a model before they begin."""
    shown = [-LOG_S]

    def show(progress: Progress) -> None:
        now = time.monotonic()
        if progress.done_bytes < progress.total_bytes and now - shown[0] >= LOG_S:
            shown[0] = now
            log.info("fetching", progress=progress.line)

    return ProgressWatcher(show, lambda line: log.warning("fetching", note=line))
