"""A thread with an event loop, for connections that outlive every step of the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


class LoopThread:
    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def soon(self, call: Callable[..., object], *args: Any) -> None:
        """Make a call on the thread, after earlier ones. Returns at once."""
        self.loop.call_soon_threadsafe(call, *args)

    def stop(self) -> None:
        """End the thread and all of its tasks. Returns when it has ended."""
        if self._thread.is_alive():
            self.soon(self.loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.close()
