"""The process of `renderer.py`: it reads the sources of chat templates, then conversations.

Each message is a line of JSON, and so is its answer. Templates are not trusted: the process has
limits on memory and processor time, and ends when a template exceeds them.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from weft.config.process import limit_memory, limit_work, serve
from weft.json_types import JsonObject
from weft.messages.sampling import InvalidParam
from weft.text.templates.chat_template import ChatTemplate, TemplateError

MAX_MEMORY = 1 << 29  # bytes of address space, in addition to those used after the start


def main() -> None:
    serve(TemplateWorker(limit_work, limit_memory))


class TemplateWorker:
    """Answers the sources with {}, and each conversation with {"text": ..., "warnings": [...]}.

    Errors are {"error": the message, "param": the faulty field}.
    """

    def __init__(
        self, limit_work: Callable[[float], None], limit_memory: Callable[[int], None]
    ) -> None:
        """The limits are those of `config.process`."""
        self._limit_work = limit_work
        self._limit_memory = limit_memory
        self._template: ChatTemplate | None = None

    def __call__(self, line: bytes) -> bytes:
        return json.dumps(self._answer(line)).encode()

    def _answer(self, line: bytes) -> JsonObject:
        try:
            question = json.loads(line)
            self._limit_work(question["work_s"])
            if self._template is None:
                self._limit_memory(MAX_MEMORY)
                self._template = ChatTemplate(question["sources"], question["special_tokens"])
                return {}
            found = self._template.rendered(question["messages"], **question["options"])
            return found._asdict()
        except InvalidParam as exc:
            return {"error": str(exc), "param": exc.param}
        except MemoryError:
            error = TemplateError("the chat template needs too much memory")
            return {"error": str(error), "param": error.param}
        finally:
            self._limit_work(0.0)


if __name__ == "__main__":
    main()
