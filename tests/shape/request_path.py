"""Which files and functions of weft a completion request enters, after warm-up, with front and
engine in one process.

python -m tests.shape.request_path [--chat] [--stream] [--list]
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.server.real_engine import serving

WEFT = Path(__file__).parents[2] / "weft"


def entered(path: str, body: dict[str, Any]) -> dict[str, set[str]]:
    """The functions that a request enters, by file: those of each of two. The same request ran once
    before; what happens once in some seconds, such as a line in the log, is part of neither."""
    with serving((WEFT / "bundled" / "weft-nano").resolve(), kv_tokens=4096) as server:
        assert server.post(path, **body).status_code == 200
        first = _traced(lambda: server.post(path, **body))
        second = _traced(lambda: server.post(path, **body))
    both = {file: first[file] & second[file] for file in first if file in second}
    return {file: functions for file, functions in both.items() if functions}


def _traced(work: Callable[[], object]) -> dict[str, set[str]]:
    """The functions that are entered meanwhile, by file."""
    found: dict[str, set[str]] = defaultdict(set)
    root = f"{WEFT}/"

    def trace(frame: FrameType, event: str, arg: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(root):
            name = f"{frame.f_code.co_qualname}:{frame.f_code.co_firstlineno}"
            found[file.removeprefix(root)].add(name)

    threading.settrace(trace)
    if hasattr(threading, "settrace_all_threads"):
        threading.settrace_all_threads(trace)
    sys.settrace(trace)
    work()
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    if hasattr(threading, "settrace_all_threads"):
        threading.settrace_all_threads(None)
    return found


def completion(stream: bool = False) -> tuple[str, dict[str, Any]]:
    """A plain request for a completion: path and body."""
    body = {"prompt": "import os\n\nclass ", "max_tokens": 4, "temperature": 0.7, "top_p": 0.9}
    return "/v1/completions", {"model": "tiny", "stream": stream, **body}


def chat(stream: bool = False) -> tuple[str, dict[str, Any]]:
    """A plain chat request: path and body."""
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0.7, "top_p": 0.9}
    return "/v1/chat/completions", {"model": "tiny", "stream": stream, **body}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chat", action="store_true", help="a chat request")
    parser.add_argument("--stream", action="store_true", help="a streamed answer")
    parser.add_argument(
        "--list", action="store_true", help="print every file, in the order of first entry"
    )
    asked = parser.parse_args()
    make = chat if asked.chat else completion
    found = entered(*make(asked.stream))
    if asked.list:
        for file in found:
            print(f"{file:48} {len(found[file]):3} functions")
    print(f"{len(found)} files, {sum(map(len, found.values()))} functions")


if __name__ == "__main__":
    main()
