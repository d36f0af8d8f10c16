"""Starts `python -m weft` as a copy of a process that has imported weft already: of a start, three
quarters of the processor's time are imports.

    tests ── words, environment, folder, files ──▶ first process ─ fork ─▶ front ─ fork ─▶ engine
          ◀─ of each server: its id, and how it ended ─

Front and engine are processes like those of a real start: the engine is the front's child, leads a
group of its own, and has no file of the front but its standard ones. A front that has threads
cannot be copied: its later engines are children of a copy that it made before. What a process of
weft imports, and when, other tests see: those of `tests/launch` start the real commands.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

MOST_BYTES = 1 << 17  # of the words and the environment of a server
ENGINE = "weft.launch.start_worker"
NUM_FILES = 4  # the server's socket, and its standard input, output and error
ROOM = "x" * 1000  # in the command of the first process, for the commands of the others
# Read when a module or a library is imported: with another value, a real start is needed.
READ_EARLY = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "TRITON_", "CUDA", "LD_", "WEFT_CACHE")
LOCK = threading.Lock()
ARG_START, ARG_END = 45, 46  # columns of /proc/self/stat behind the name of the program


# ---- in the process of the tests


class ForkedServer:
    """What `subprocess.Popen` is for a command: its process, whose parent is the first process."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        engine: str = ENGINE,
    ) -> None:
        """Start `weft` with these words. It writes errors into `stderr`, and has no output.
        `environment` None: that of this process. `engine`: the module whose `main` is the engine.
        """
        reader, writer = os.pipe()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ if environment is None else environment)
        request = json.dumps([list(words), environment, os.getcwd(), engine]).encode()
        with theirs, open(os.devnull, "r+b") as nothing:
            files = [theirs.fileno(), nothing.fileno(), nothing.fileno(), writer]
            socket.send_fds(first_process(), [request], files)
        os.close(writer)
        self._status = ours
        self.stderr: IO[str] | None = os.fdopen(reader, "r")
        self.pid = int(ours.recv(MOST_BYTES))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._has_ended_within(0.0):
            self._take_status()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._has_ended_within(timeout):
                raise subprocess.TimeoutExpired("weft", timeout or 0.0)
            self._take_status()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _has_ended_within(self, timeout_s: float | None) -> bool:
        # `select` takes no file whose number is above 1,023.
        waiting = select.poll()
        waiting.register(self._status, select.POLLIN)
        return bool(waiting.poll(None if timeout_s is None else 1e3 * timeout_s))

    def _take_status(self) -> None:
        text = self._status.recv(MOST_BYTES)
        assert text, "the process that starts servers has ended"
        self.returncode = int(text)
        self._status.close()


def can_fork(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a server that is forked now is what a real start would give."""
    asked = os.environ if environment is None else environment
    return sys.platform == "linux" and _early(asked) == _early_at_first()


def first_process() -> socket.socket:
    """The socket of the first process, which copies of this process share; it ends when all of
    them have."""
    with LOCK:
        return _first_process()[0]


@cache
def _first_process() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = theirs.fileno()
        command = [sys.executable, "-m", "tests.forked", str(number), ROOM]
        return ours, subprocess.Popen(
            command, pass_fds=[number], stdin=subprocess.DEVNULL, process_group=0
        )


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(READ_EARLY)}
    found.pop("PYTHONPATH", None)  # a copy can follow another one
    return found


@cache
def _early_at_first() -> dict[str, str]:
    return _early(os.environ)


_early_at_first()


# ---- in the first process


def main(control: socket.socket) -> NoReturn:
    """Fork a server for each request, and report its end, until the tests end."""
    _import_weft()
    _fork_for(control, _be_weft)


def _fork_for(
    control: socket.socket, become: Callable[[bytes, Sequence[int]], NoReturn]
) -> NoReturn:
    """For each request fork a process that becomes what is asked for, with the files behind the
    first, and send its id and its end to the first file."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    servers: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for number, _ in poll.poll():
            if number != control.fileno():
                pid, status = servers.pop(number)
                poll.unregister(number)
                os.close(number)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _send(status, code)
                status.close()
                continue
            request, files, _, _ = socket.recv_fds(control, MOST_BYTES, NUM_FILES)
            if not request:
                os._exit(0)
            pid = os.fork()
            if not pid:
                become(request, files[1:])
            for file in files[1:]:
                os.close(file)
            status = socket.socket(fileno=files[0])
            _send(status, pid)
            handle = os.pidfd_open(pid)
            servers[handle] = (pid, status)
            poll.register(handle, select.POLLIN)


def _send(status: socket.socket, number: int) -> None:
    with suppress(OSError):  # the test has ended without waiting
        status.send(str(number).encode())


def _import_weft() -> None:
    gc.disable()
    for module in ("cli.main", "launch.serve", "launch.supervisor", "launch.worker"):
        import_module(f"weft.{module}")
    gc.freeze()
    gc.enable()


# ---- in the front and in the engine


class ForkedEngine:
    """What `engine_process.py` wants of a process that it starts."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        process_group: int,
        env: Mapping[str, str] | None,
        pass_fds: Sequence[int],
    ) -> None:
        main = import_module(command[-1]).main
        reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.setpgid(0, process_group)
            os.dup2(reader, 0)
            _close_files(pass_fds)
            _begin(command, os.environ if env is None else env)
            _run(main)
        os.close(reader)
        self.stdin = os.fdopen(writer, "wb")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class EngineBesideThreads:
    """An engine that the early copy of the front has forked."""

    def __init__(
        self, starter: socket.socket, command: Sequence[str], env: Mapping[str, str] | None
    ) -> None:
        reader, writer = os.pipe()
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps([command, dict(os.environ if env is None else env)]).encode()
        with theirs:
            socket.send_fds(starter, [request], [theirs.fileno(), reader])
        os.close(reader)
        self.stdin = os.fdopen(writer, "wb")
        self.pid = int(self._status.recv(MOST_BYTES))

    def wait(self) -> int:
        with self._status:
            return int(self._status.recv(MOST_BYTES))


def _early_copy() -> socket.socket:
    """Copy this process, which has no threads yet. Returns the socket that asks the copy for
    engines; it ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        os.setpgid(0, 0)
        _fork_for(theirs, _be_engine)
    theirs.close()
    return ours


def _be_engine(request: bytes, files: Sequence[int]) -> NoReturn:
    command, environment = json.loads(request)
    os.setpgid(0, 0)
    os.dup2(files[0], 0)
    _close_files(())
    _begin(command, environment)
    _run(import_module(command[-1]).main)


def _engine(starter: socket.socket, command: Sequence[str], **options: Any) -> object:
    """An engine of the front that this process is. Beside threads, a copy could wait for ever for
    what they do."""
    names = {thread.name for thread in threading.enumerate()}
    if names <= {threading.main_thread().name, "engine-reaper"}:
        return ForkedEngine(command, **options)
    if options["pass_fds"]:
        return subprocess.Popen(command, **options)
    return EngineBesideThreads(starter, command, options["env"])


def _be_weft(request: bytes, files: Sequence[int]) -> NoReturn:
    from weft.cli.main import main
    from weft.config.process import module_command
    from weft.launch import engine_process

    words, environment, folder, engine = json.loads(request)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
    _close_files(())
    os.chdir(folder)
    start = partial(_engine, _early_copy())
    _begin([sys.executable, "-m", "weft", *words], environment)
    engine_process.COMMAND = module_command(engine)
    vars(engine_process)["subprocess"] = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)
    sys.argv = ["weft", *words]
    _run(lambda: main(words))


def _begin(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have the signals, the environment and the command line of a program that has just begun."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before, now = (each.get("PYTHONPATH", "") for each in (os.environ, environment))
    _follow_python_path(before.split(os.pathsep), now.split(os.pathsep))
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    _show_command(command)


def _follow_python_path(before: Sequence[str], now: Sequence[str]) -> None:
    """Find modules where a program finds them that begins with this PYTHONPATH."""
    own, *others = sys.path
    sys.path[:] = [own, *filter(None, now), *(one for one in others if one not in before)]
    invalidate_caches()


def _show_command(command: Iterable[str]) -> None:
    """Let others see this command line: it is written over that of the first process."""
    columns = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    start, end = int(columns[ARG_START]), int(columns[ARG_END])
    text = b"\0".join(map(os.fsencode, command))
    ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _close_files(spared: Iterable[int]) -> None:
    """Close all files but the standard ones and `spared`."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in spared:
            with suppress(OSError):  # that of the listing is closed
                os.close(int(name))


def _run(program: Callable[[], int | None]) -> NoReturn:
    """Run a program and end as Python does when it is over, without freeing what was imported."""
    status: object = 1
    try:
        status = program()
    except SystemExit as exc:
        status = exc.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
