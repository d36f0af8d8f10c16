"""Renders conversations with the model's chat template, in separate processes.

A template comes with a checkpoint, or even with a request. In Jinja a small template can cause much
work, in C operations that no thread of this process could interrupt. So templates are compiled and
run in processes with limits on memory and processor time; a process that exceeds them ends, and is
started again. This process never runs a template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from weft.config.helper import Helper, HelperFailed
from weft.config.process import Child
from weft.json_types import JsonObject
from weft.text.helpers import HelperPool
from weft.text.templates.chat_template import Rendered, TemplateError, check_sources

MODULE = "weft.text.templates.render_process"
NUM_PROCESSES = 2
COMPILE_WORK_S = 10.0  # of processor time, for the templates of the model
RENDER_WORK_S = 5.0
# Bytes of a conversation. Longer ones, and requests with their own template, never take the last
# free process.
LONG_LEN = 65_536


# A process that has been started ahead, which then belongs to the caller; None: there is none.
TakeChild = Callable[[], Child | None]


def none_ready() -> None:
    """No process has been started ahead."""


class Renderer:
    """The chat template of one model. For one event loop."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        take_child: TakeChild = none_ready,
    ) -> None:
        """`sources` by name: "default", and perhaps "tool_use". `take_child`: a process of `MODULE`
        to begin with.

        Raises `TemplateError` for a source that is not a template.
        """
        check_sources(sources)
        setup = {
            "sources": dict(sources),
            "special_tokens": dict(special_tokens),
            "work_s": COMPILE_WORK_S,
        }
        self.processes = [Helper(MODULE, _encoded(setup), _checked) for _ in range(NUM_PROCESSES)]
        self._pool = HelperPool(self.processes, "the chat template")
        child = take_child()
        if child is not None:
            self.processes[0].adopt(child)
        try:
            self._set_up()
        except HelperFailed as exc:
            self.close()
            raise _failed(exc, COMPILE_WORK_S) from None
        except TemplateError:
            self.close()
            raise

    def close(self) -> None:
        """End the processes. `render` raises `Busy` afterwards."""
        self._pool.close()

    async def render(self, messages: Sequence[Any], **options: Any) -> str:
        """The text of `rendered` with these options."""
        return (await self.rendered(messages, **options)).text

    async def rendered(self, messages: Sequence[Any], **options: Any) -> Rendered:
        """`ChatTemplate.rendered` with these options.

        Messages are structs or dicts with OpenAI's fields. Raises `TemplateError`, or `Busy`.
        """
        question = _encoded({"messages": messages, "options": options, "work_s": RENDER_WORK_S})
        is_long = len(question) > LONG_LEN or options.get("source") is not None

        def work(process: Helper) -> Rendered:
            answer = _checked(process.ask(question, RENDER_WORK_S))
            return Rendered(str(answer["text"]), tuple(answer["warnings"]))

        try:
            return await self._pool.run(work, is_long=is_long)
        except HelperFailed as exc:
            raise _failed(exc, RENDER_WORK_S) from None

    def _set_up(self) -> None:
        """The first process knows the template. Raises as `Helper.set_up`."""
        first = self.processes[0]
        try:
            first.start()
            first.set_up()
        except HelperFailed as exc:
            if exc.out_of_time and not exc.hung:
                raise
            # Somebody else may have killed or stopped it, which says nothing of the template.
            first.start()
            first.set_up()


def _checked(line: bytes) -> JsonObject:
    """The answer in a line. Raises `TemplateError` for an error."""
    answer = msgspec.json.decode(line, type=JsonObject)
    if "error" in answer:
        raise TemplateError(answer["error"], answer["param"])
    return answer


def _failed(exc: HelperFailed, work_s: float) -> TemplateError:
    if exc.out_of_time:
        return TemplateError(f"the chat template took longer than {work_s:g} s")
    return TemplateError("the chat template needs too much memory")


def _encoded(question: JsonObject) -> bytes:
    try:
        return msgspec.json.encode(question)
    except OverflowError:  # an integer of more than 64 bits, somewhere in the tools
        return json.dumps(msgspec.to_builtins(question)).encode()
