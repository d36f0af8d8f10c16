"""An engine in the process of its user, without an event loop: a thread that waits for an output
steps the engine, and delivers what comes out to all who wait.

    thread 1 ──▶ submit ─▶ step ──────────▶ step ─▶ its output
    thread 2 ───────────▶ submit ─▶ step ─▶ step ──▶ step ─▶ its output

One thread steps at a time, and none twice while another one waits, so their requests share the
steps.

A process that is forked from this one gets neither the threads nor the helper processes of the
engine, and perhaps the middle of a step: nothing in it uses the engine, or ends what belongs to
this process.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from weft.client.client import EngineClient
from weft.client.generation import Generation
from weft.config.options import SettingsError
from weft.messages.adapters import AdapterReply, LoadLoraAdapter, UnloadLoraAdapter
from weft.messages.codec import ToEngine
from weft.messages.requests import GenerateRequest
from weft.messages.status import EngineReady
from weft.messages.wakeup import WakeupPipe
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.journal.recorder import RecordedEngine

LONGEST_WAIT_S = 1.0  # for the engine, so that Ctrl-C is noticed
# Signals that programs have functions for, which may raise: Ctrl-C, and bounds of time.
DELAYED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2),
)
Handler: TypeAlias = Callable[[int, FrameType | None], object]
CLOSED = "LLM: it is closed"
FORKED = (
    "LLM: this process was forked from one that had a model, and cannot use one; start it with "
    "multiprocessing.get_context('spawn')"
)


def require_unforked() -> None:
    """Raises SettingsError in a process that was forked from one with an engine: threads that
    libraries have started are missing in it, and they would wait for them forever."""
    if _processes - {os.getpid()}:
        raise SettingsError(FORKED)


class OwnEngine:
    """Whoever looks at what steps change, or changes it, owns `lock` meanwhile."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        engine: Engine | RecordedEngine,
        ready: EngineReady,
        wakeup: WakeupPipe,
        end: Callable[[], object],
    ) -> None:
        """`end` ends the threads and processes of the engine."""
        self.engine: Engine | RecordedEngine | ClosedEngine = engine
        self.lock = FairLock(on_wait=wakeup.notify)
        self.num_ended = 0  # completions that steps have ended so far
        self._end = end
        self._wakeup = wakeup
        self._inbox: deque[ToEngine] = deque()
        self.client = EngineClient(tokenizer, self._inbox.append)
        self.client.deliver(ready)
        _engines.add(self)
        _processes.add(os.getpid())

    @property
    def facts(self) -> EngineReady:
        """What the engine has said of itself."""
        return self.client.engine

    @property
    def num_open(self) -> int:
        """Completions that have not ended, of all threads."""
        return self.client.num_open

    def submit(self, requests: Sequence[GenerateRequest], *, stream: bool = False) -> Generation:
        """Errors as for `EngineClient.submit`."""
        with self.lock:
            return self.client.submit(requests, stream=stream)

    @contextmanager
    def submitted(
        self, requests: Sequence[GenerateRequest], *, stream: bool = False
    ) -> Iterator[Generation]:
        """A generation that is aborted at the end of the block, if it is open then."""
        generation = self.submit(requests, stream=stream)
        try:
            yield generation
        finally:
            self.leave([generation])

    def leave(self, generations: Sequence[Generation]) -> None:
        """Abort what is open of them."""
        with self.lock:
            for generation in generations:
                generation.close()

    def step(self) -> None:
        """Give the engine what waits for it, let it do one step, and deliver what comes out. With
        nothing to do, wait for a moment."""
        with self.lock:
            engine = self.engine
            client = self.client
            with self._counted_ends(), DelayedSignals():
                while self._inbox:
                    reply = engine.submit(self._inbox.popleft())
                    if reply is not None:
                        client.deliver(reply)
                assert engine.has_work or not client.num_open, "the engine has forgotten a request"
                for message in engine.step():
                    client.deliver(message)
            if client.num_open and not self._inbox and engine.has_work:
                # No step can do anything before: a grammar is being compiled, or a deadline is
                # waited for.
                wait_s = engine.wait_s
                if wait_s > 0:
                    self._wakeup.wait(min(wait_s, LONGEST_WAIT_S))

    def ask(self, message: LoadLoraAdapter | UnloadLoraAdapter) -> AdapterReply:
        """The engine's answer. Completions of others go on meanwhile."""
        with self.lock, self._counted_ends():
            engine = self.engine
            reply = engine.submit(message)
            while not isinstance(reply, AdapterReply):
                if reply is not None:
                    self.client.deliver(reply)
                reply = None
                for one in engine.step():
                    if isinstance(one, AdapterReply):
                        reply = one
                    else:
                        self.client.deliver(one)
            return reply

    @contextmanager
    def _counted_ends(self) -> Iterator[None]:
        """Other threads look for theirs, whatever interrupts this one."""
        num_open = self.client.num_open
        try:
            yield
        finally:
            self.num_ended += num_open - self.client.num_open

    def forked(self) -> None:
        """In a forked process: leave what belongs to the first one. Every later use raises
        SettingsError."""
        self.lock = FairLock(on_wait=_nothing)
        self.engine = ClosedEngine(FORKED)
        self._end = _nothing

    def close(self) -> None:
        """End the engine's threads and processes. Every later use raises SettingsError."""
        with self.lock:
            if not isinstance(self.engine, ClosedEngine):
                self.engine = ClosedEngine(CLOSED)
            self._end()
        # What the engine has warmed up with was taken from the collector's sight.
        gc.unfreeze()
        gc.collect()


class ClosedEngine:
    """What is there instead of an engine that cannot be used any more: every use is refused."""

    wait_s = 0.0

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def submit(self, message: ToEngine) -> NoReturn:
        raise SettingsError(self._reason)

    def step(self) -> NoReturn:
        raise SettingsError(self._reason)

    @property
    def has_work(self) -> bool:
        raise SettingsError(self._reason)


class FairLock:
    """A lock that no thread keeps from others by taking it again and again. Its owner may take it
    once more.

    Who waits for it has the gate. So a thread that has released the lock, and wants it again, waits
    for the gate until the other one has had the lock. The collector may close a stream of this
    thread at any point in here, which takes the lock, too: only locks know their owner at each
    point.
    """

    def __init__(self, on_wait: Callable[[], None]) -> None:
        """`on_wait` is called when a thread begins to wait for the lock."""
        self._on_wait = on_wait
        self._gate = threading.RLock()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]  # Condition asks for it, too
            self._lock.acquire()
            return
        with self._gate:
            if not self._lock.acquire(blocking=False):
                self._on_wait()
                self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


class DelayedSignals:
    """Within this block Ctrl-C, and other signals for which the program has a function, wait for
    its end: nothing is interrupted in the middle.

    Only the main thread can do this; elsewhere the block does nothing, because Python calls these
    functions in no other thread.
    """

    def __enter__(self) -> None:
        self._arrived: list[int] = []
        self._before: dict[int, Handler] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in DELAYED:
            handler = signal.getsignal(signum)
            if callable(handler):
                self._before[signum] = handler
                signal.signal(signum, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        with ExitStack() as stack:  # each is called, whatever another one raises
            for signum in reversed(self._arrived):
                stack.callback(self._before[signum], signum, None)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum not in self._arrived:
            self._arrived.append(signum)


def _nothing() -> None:
    pass


def _leave_all() -> None:
    for own in list(_engines):
        own.forked()


_engines: weakref.WeakSet[OwnEngine] = weakref.WeakSet()
_processes: set[int] = set()  # this one, and those that it was forked from, if they had an engine
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)
