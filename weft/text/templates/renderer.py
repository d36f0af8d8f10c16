"""Renders conversations with the model's chat template, in separate processes.

A template comes with a checkpoint, or even with a request. In Jinja a small template can cause much
work, in C operations that no thread of this process could interrupt. So templates are compiled and
run in processes with limits on memory and processor time; a process that exceeds them ends, and is
started again. This process never runs a template.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weft.config.process import Child, ChildEnded
from weft.json_types import JsonObject
from weft.text.templates.chat_template import Rendered, TemplateError, check_sources
from weft.text.turns import Workers

NUM_PROCESSES = 2
COMPILE_WORK_S = 10.0  # of processor time, for the templates of the model
RENDER_WORK_S = 5.0
SLOW_S = 60.0  # more wall-clock time, for a busy machine; then the process counts as hung
# Bytes of a conversation. Longer ones, and requests with their own template, never take the last
# free process.
LONG_LEN = 65_536


class Renderer:
    """The chat template of one model. For one event loop."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` by name: "default", and perhaps "tool_use".

        Raises `TemplateError` for a source that is not a template.
        """
        check_sources(sources)
        self._setup = {"sources": dict(sources), "special_tokens": dict(special_tokens)}
        self._workers = Workers(NUM_PROCESSES, "the chat template")
        self._processes = [_RenderProcess(self._setup) for _ in range(NUM_PROCESSES)]
        self._idle = self._processes[::-1]  # each taken by one thread at a time
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, self._processes)
        try:
            self._processes[0].set_up()
        except TemplateError:
            self.close()
            raise

    def close(self) -> None:
        """End the processes. `render` may not be called afterwards."""
        self._finalizer()

    async def render(self, messages: Sequence[Any], **options: Any) -> str:
        """The text of `rendered` with these options."""
        return (await self.rendered(messages, **options)).text

    async def rendered(self, messages: Sequence[Any], **options: Any) -> Rendered:
        """`ChatTemplate.rendered` with these options.

        Messages are structs or dicts with OpenAI's fields. Raises `TemplateError`, or `Busy`.
        """
        question = _encoded({"messages": messages, "options": options, "work_s": RENDER_WORK_S})
        is_long = len(question) > LONG_LEN or options.get("source") is not None
        return await self._workers.run(lambda: self._render(question), is_long=is_long)

    def _render(self, question: bytes) -> Rendered:
        """Render in a free process. Runs in a thread."""
        with self._lock:
            # Take the process that was used last; start the other free ones for later.
            process = self._idle.pop()
            for other in self._idle:
                other.start()
        try:
            answer = process.ask(question, RENDER_WORK_S)
            return Rendered(str(answer["text"]), tuple(answer["warnings"]))
        finally:
            with self._lock:
                self._idle.append(process)


class _RenderProcess:
    """One process for rendering, which is started again if it has ended."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup = setup
        self._child: Child | None = None
        self._is_set_up = False

    def start(self) -> None:
        """Begin to start a process, if none is alive. Does not wait."""
        if self._child is not None and not self._child.is_alive:
            self.close()
        if self._child is None:
            self._child = Child("weft.text.templates.render_process")
            self._is_set_up = False

    def set_up(self) -> None:
        """Let the process compile the templates. Raises `TemplateError` if they are broken."""
        self.start()
        if not self._is_set_up:
            question = _encoded({**self._setup, "work_s": COMPILE_WORK_S})
            self._ask(question, COMPILE_WORK_S)
            self._is_set_up = True

    def ask(self, question: bytes, work_s: float) -> JsonObject:
        self.set_up()
        return self._ask(question, work_s)

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _ask(self, question: bytes, work_s: float) -> JsonObject:
        assert self._child is not None
        try:
            line = self._child.ask(question, work_s + SLOW_S)
        except TimeoutError:
            self.close()
            raise _too_long(work_s) from None
        except ChildEnded as exc:
            self.close()
            if exc.out_of_time:
                raise _too_long(work_s) from None
            raise TemplateError("the chat template needs too much memory") from None
        answer = msgspec.json.decode(line, type=JsonObject)
        if "error" in answer:
            raise TemplateError(answer["error"], answer["param"])
        return answer


def _too_long(work_s: float) -> TemplateError:
    return TemplateError(f"the chat template took longer than {work_s:g} s")


def _encoded(question: JsonObject) -> bytes:
    try:
        return msgspec.json.encode(question)
    except OverflowError:  # an integer of more than 64 bits, somewhere in the tools
        return json.dumps(msgspec.to_builtins(question)).encode()


def _close(processes: Sequence[_RenderProcess]) -> None:
    for process in processes:
        process.close()
