"""The engine as a child process. The launcher gives it a private folder for its sockets, notices
its end immediately, and never leaves it running.

    launcher ── stdin: one line of JSON, and open while the launcher lives ─────▶ engine
             ◀─ ipc sockets in a folder private to this user (mode 0700) ───────▶

It knows nothing of the messages on the sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from weft.config.engine_args import EngineArgs
from weft.config.process import module_command

COMMAND = module_command("weft.launch.start_worker")
FOLDER_PREFIX = "weft-"
RPC_SOCKET = "rpc"  # name of its address in the folder
LONGEST_PARENT = 60  # the path of a socket may have 103 bytes on some systems


class SocketFolder:
    """A folder for sockets that only this user can enter; it is removed on exit."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(bytes(parent)) > LONGEST_PARENT:
            parent = Path("/tmp")
        _remove_stale(parent)
        self.path = Path(
            tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=parent)
        )  # mode 0700

    def address(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def __enter__(self) -> SocketFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Remove the folders of launchers that were killed before they could remove them."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and folder.lstat().st_uid == os.getuid() and not _is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class EngineProcess:
    """A running engine process, in its own process group: Ctrl-C reaches only the launcher, which
    stops the engine in order.

    The engine stays in the launcher's session: Linux divides processor time between sessions
    (sched(7), autogroup), so a priority set for the server also applies to the engine.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, files: Sequence[int] = ()
    ) -> None:
        """Start the process. It imports its modules and waits for `begin`. `environment` None: the
        launcher's environment. `files`: open file descriptors that the process inherits."""
        self._args: EngineArgs | None = None
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, process_group=0, env=environment, pass_fds=files
        )
        self._exit: Future[int] = Future()
        self._exit.set_running_or_notify_cancel()
        threading.Thread(target=self._reap, name="engine-reaper", daemon=True).start()
        assert self._process.stdin is not None
        self._stdin = self._process.stdin

    def begin(self, args: EngineArgs) -> None:
        """Send the process the model and the settings to serve."""
        self._args = args
        with contextlib.suppress(BrokenPipeError):  # it has ended already: `ended` returns
            self._stdin.write(args.to_json() + b"\n")
            self._stdin.flush()

    @property
    def args(self) -> EngineArgs:
        assert self._args is not None, "the engine has not been told to begin"
        return self._args

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._exit.done()

    async def ended(self) -> int:
        """Wait until the process ends. Returns its exit status, or -n if signal n ended it."""
        return await asyncio.shield(asyncio.wrap_future(self._exit))

    def kill(self) -> None:
        """Kill the process and its process group immediately."""
        if not self._exit.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def hang_up(self) -> None:
        """Close the engine's standard input, which ends an engine that has begun immediately. Kill
        an engine that has not begun."""
        if self._args is None:
            self.kill()
        with contextlib.suppress(OSError):
            self._stdin.close()

    def stop(self, timeout_s: float) -> int:
        """Hang up; kill the process if it takes longer than `timeout_s` to end. Returns the same as
        `ended`."""
        self.hang_up()
        try:
            return self._exit.result(timeout_s)
        except TimeoutError:
            self.kill()
        return self._exit.result()

    def _reap(self) -> None:
        self._exit.set_result(self._process.wait())


def explain_exit(status: int) -> str:
    """The reason why an engine ended that sent no `EngineFailed`. `status`: as returned by
    `EngineProcess.ended`."""
    if status >= 0:
        return f"The engine process ended with exit status {status}; its last output is above."
    if -status == signal.SIGKILL:
        return (
            "The engine process was killed (SIGKILL). If nobody did that, the system had no "
            "memory left: lower --kv-tokens or --memory-fraction."
        )
    return f"The engine process was ended by signal {-status} ({signal.strsignal(-status)})."
