"""What hostile requests of an agent cost a stream beside them: its longest gap between two tokens while each is
served or refused, in steps.

    python -m benchmarks.agent_attacks [MODEL]

Grammars that explode, are ambiguous, deep or huge, tool lists of 2 MB, thousands of items. The stream alone gives the
usual step, and the gaps that the machine makes by itself. An attack that is served is a prompt, too, for which streams
are slowed down as for any other: so a plain request with as many tokens follows it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from benchmarks.servers import served

Body = dict[str, Any]
HI: list[Body] = [{"role": "user", "content": "Hi"}]
NUM_ITEMS = 10_000
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "on",
    "with",
    "he",
    "it",
    "as",
    "at",
    "his",
    "by",
    "had",
    "not",
    "but",
    "from",
]
REST_S = 0.3  # between two attacks
FIRST_REST_S = 4.0  # in which a server loads what grammars need


def custom(definition: str, syntax: str = "lark", name: str = "patch") -> Body:
    format = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": name, "format": format}


def response(*tools: Body, items: list[Body] | None = None, **more: Any) -> tuple[str, Body]:
    body = {"input": items or HI, "tools": list(tools), "max_output_tokens": 24, "store": False}
    return "/v1/responses", {**body, **more}


def function(number: int, words: int) -> Body:
    text = "Look before you change. " * words
    parameters = {"type": "object", "properties": {"cmd": {"type": "string"}}}
    return {
        "type": "function",
        "name": f"tool_{number}",
        "description": text,
        "parameters": parameters,
    }


def forced(definition: str, syntax: str = "lark") -> tuple[str, Body]:
    choice = {"type": "custom", "name": "patch"}
    return response(custom(definition, syntax), tool_choice=choice)


def doubling(depth: int) -> str:
    rules = [f"a{i}: a{i + 1} a{i + 1}" for i in range(depth)]
    return "\n".join(["start: a0", *rules, f'a{depth}: "x"'])


def chain(length: int) -> str:
    rules = [f"a{i}: a{i + 1}" for i in range(length)]
    return "\n".join(["start: a0", *rules, f"a{length}: /[a-z]/"])


def strict(depth: int) -> Body:
    schema: Body = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    parameters = {**schema, "required": ["a", "b"], "additionalProperties": False}
    return {"type": "function", "name": "deep", "strict": True, "parameters": parameters}


ATTACKS: dict[str, Callable[[], tuple[str, Body]]] = {
    "an ambiguous grammar": lambda: forced("start: a+\na: b+\nb: c*\nc: /[a-z ]*/ | a"),
    "an ambiguous sum": lambda: forced('start: e\ne: e "+" e | e "*" e | e e | /[a-z0-9 ]/'),
    "rules that double": lambda: forced(doubling(40)),
    "a chain of 5,000 rules": lambda: forced(chain(5_000)),
    "left recursion of two rules": lambda: forced('start: a\na: b "x" | "y"\nb: a "z" | a'),
    "endless recursion": lambda: forced("start: a\na: a"),
    "20,000 brackets": lambda: forced("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "30,000 words": lambda: forced("start: " + " | ".join(f'"w{i}"' for i in range(30_000))),
    "counts in counts": lambda: forced("((a{1,1000}){1,1000}){1,1000}", "regex"),
    "counts around a letter": lambda: forced(".{1,5000}x.{1,5000}", "regex"),
    "a pattern that explodes": lambda: forced("(.*a){20}.{20}", "regex"),
    "alternatives with one beginning": lambda: forced("((a|b)*(a|c)*){50}x", "regex"),
    "a grammar of 1 MB": lambda: forced('start: "a"\n' + "// nothing\n" * 90_000),
    "64 custom tools": lambda: response(
        *(custom(f'start: "a"+ /{i}[a-z]*/', name=f"t{i}") for i in range(64))
    ),
    "a schema of 2 ** 12 parts": lambda: response(strict(12), tool_choice="required"),
    "a tool list of 2 MB": lambda: response(*(function(i, 800) for i in range(100))),
    "1,000 forced tools": lambda: response(
        *(function(i, 8) for i in range(1_000)), tool_choice="required"
    ),
    "10,000 items": lambda: response(items=HI * NUM_ITEMS),
    "10,000 parts": lambda: response(
        items=[{"role": "user", "content": [{"type": "input_text", "text": "a"}] * NUM_ITEMS}]
    ),
    "namespaces 100 deep": lambda: response(nested(100)),
    "a name of 1 MB": lambda: response({**function(0, 1), "name": "a" * 1_000_000}),
}


def nested(depth: int) -> Body:
    tool = function(0, 1)
    for _ in range(depth):
        tool = {"type": "namespace", "name": "n", "tools": [tool]}
    return tool


class Stream:
    """Streams, one after another, and when their pieces come."""

    def __init__(self, url: str) -> None:
        self.gaps: list[tuple[float, float]] = []  # from a piece to the next one of its stream
        self._url = url
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_ended.set()
        self._thread.join()

    def longest_s(self, began_s: float, ended_s: float) -> float:
        """The longest gap of those that a span touches."""
        gaps = [
            later - earlier
            for earlier, later in self.gaps[:]
            if later >= began_s and earlier <= ended_s
        ]
        return max(gaps, default=0.0)

    def _read(self) -> None:
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._url, timeout=600) as client:
            while not self._is_ended.is_set():
                last_s = 0.0
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            now = time.perf_counter()
                            if last_s:
                                self.gaps.append((last_s, now))
                            last_s = now
                        if self._is_ended.is_set():
                            return


def beside(
    stream: Stream, client: httpx.Client, path: str, body: Body
) -> tuple[httpx.Response, float, float]:
    """The answer, how long it took, and the longest gap of the stream meanwhile, in seconds."""
    data = json.dumps(body)
    began_s = time.perf_counter()
    answer = client.post(path, content=data, headers={"content-type": "application/json"})
    ended_s = time.perf_counter()
    time.sleep(REST_S)
    return answer, ended_s - began_s, stream.longest_s(began_s, ended_s)


def plain(num_tokens: int) -> tuple[str, Body]:
    """A request with about so many tokens, which has no tools, and nothing that is cached."""
    words = random.Random(num_tokens).choices(WORDS, k=num_tokens)
    return response(items=[{"role": "user", "content": " ".join(words)}])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure streams beside hostile requests.")
    parser.add_argument("model", nargs="?", default="weft-nano")
    parser.add_argument("--only", default="", help="attacks whose name has this text")
    parser.add_argument("--options", default="", help="further options of the server")
    asked = parser.parse_args()
    words = ("serve", asked.model, "--threads", "1", *asked.options.split())
    with served(*words) as server, httpx.Client(base_url=server.url, timeout=600) as client:
        time.sleep(FIRST_REST_S)
        stream = Stream(server.url)
        time.sleep(3.0)
        alone = [later - earlier for earlier, later in stream.gaps[10:]]
        step_s = statistics.median(alone)
        print(f"alone: step {1e3 * step_s:.1f} ms, longest gap {max(alone) / step_s:.1f} steps")
        for name, make in ATTACKS.items():
            if asked.only not in name:
                continue
            path, body = make()
            answer, took_s, gap_s = beside(stream, client, path, body)
            if answer.status_code == 200:
                num_tokens = answer.json()["usage"]["input_tokens"]
                _, _, plain_s = beside(stream, client, *plain(num_tokens))
                said = f"plain, {num_tokens:,} tokens: {plain_s / step_s:.1f}"
            else:
                said = answer.json()["error"]["message"][:110]
            print(
                f"{name:34} {answer.status_code}, {took_s:6.2f} s, longest gap "
                f"{1e3 * gap_s:6.1f} ms = {gap_s / step_s:5.1f} steps  {said}",
                flush=True,
            )
        stream.close()


if __name__ == "__main__":
    main()
