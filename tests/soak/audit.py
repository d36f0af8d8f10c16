"""The audit of an idle server: whatever has happened, nothing is held, open or growing, and answers
are the same."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from tests.soak.http import call
from tests.soak.ledger import Wrong

IDLE_S = 240.0  # for everything to end, and for abandoned sessions to run out of time
SETTLE_S = 60.0  # for sockets and threads to be given back
POOLED = 6  # threads that pools may make when they are first needed (tokenizing, rendering, the profiler)
POOLED_FDS = (
    16  # and pipes to their processes (grammars, templates); a leak is one for each request
)
GOLDEN_LEN = 24  # tokens
_BEGINNING = "".join(
    f"def step_{i}(state, value):\n    return state + {i} * value\n\n" for i in range(40)
)
PROMPTS = (
    "import os\n\ndef read_lines(path):\n",
    "class Stack:\n    def push(self",
    "The value of",
    "for line in open(",
    _BEGINNING[:400],  # some pages
    _BEGINNING[:700] + "class State:\n    def add(self",
    _BEGINNING[:1500] + "def last(",  # several chunks
    _BEGINNING,
)


@dataclass(frozen=True)
class Audit:
    """What was found, in numbers. Those of the first block must be 0."""

    after: str  # the phase
    at_s: float  # since the start of this server
    open_requests: int  # in the engine
    open_completions: int  # in the front
    used_slots: int
    rows: int
    held_pages: int
    sessions: int
    quarantined: int
    total_faults: int
    unreadable_messages: int
    missing_pages: int  # of which neither the tree nor the free list knows
    free: int
    cached: int
    front_fds: int
    engine_fds: int
    front_threads: int
    engine_threads: int
    front_rss_mb: float
    engine_rss_mb: float

    def faults(self, baseline: Audit | None) -> list[str]:
        """What is not as it should be; descriptors and threads are held against `baseline`."""
        zero = (
            *(
                "open_requests",
                "open_completions",
                "used_slots",
                "rows",
                "held_pages",
                "sessions",
                "quarantined",
            ),
            *("total_faults", "unreadable_messages", "missing_pages"),
        )
        mine = asdict(self)
        found = [f"{name} is {mine[name]} in the end" for name in zero if mine[name]]
        if baseline is not None:
            before = asdict(baseline)
            flat = dict.fromkeys(("front_fds", "engine_fds"), POOLED_FDS)
            flat |= dict.fromkeys(("front_threads", "engine_threads"), POOLED)
            found += [
                f"{name}: {before[name]} before, {mine[name]} now"
                for name, more in flat.items()
                if mine[name] > before[name] + more
            ]
        return [f"audit after {self.after}: {fault}" for fault in found]


async def audited(
    port: int, after: str, began: float, front: psutil.Process, engine: psutil.Process
) -> Audit:
    """Wait until the server is idle, and look. If it never is, the numbers say so."""
    idle_by = time.monotonic() + IDLE_S
    while (await _busy(port)) and time.monotonic() < idle_by:
        await asyncio.sleep(0.2)
    listed = await _get(port, "/requests")
    books = await _post(port, "/audit")
    info = await _get(port, "/server_info")
    (state,) = info["internal_states"]
    stats = state["stats"]
    await asyncio.sleep(0.1)  # for the connections of the questions to be closed over there, too
    return Audit(
        after=after,
        at_s=round(time.monotonic() - began, 1),
        open_requests=len(listed["requests"]),
        open_completions=info["open_completions"],
        used_slots=state["num_used_tokens"],
        rows=books["rows"],
        held_pages=books["held"],
        sessions=stats.get("num_sessions", 0),
        quarantined=books["quarantined"],
        total_faults=books["total_faults"],
        unreadable_messages=stats.get("total_dropped_messages", 0)
        + stats.get("total_unknown_messages", 0),
        missing_pages=books["num_pages"] - books["free"] - books["cached"] - books["quarantined"],
        free=books["free"],
        cached=books["cached"],
        front_fds=front.num_fds(),
        engine_fds=engine.num_fds(),
        front_threads=front.num_threads(),
        engine_threads=engine.num_threads(),
        front_rss_mb=round(front.memory_info().rss / 1e6, 1),
        engine_rss_mb=round(engine.memory_info().rss / 1e6, 1),
    )


async def settled(
    port: int,
    after: str,
    began: float,
    front: psutil.Process,
    engine: psutil.Process,
    baseline: Audit | None,
    settle_s: float = SETTLE_S,
) -> Audit:
    """An audit, again and again until it finds nothing or `settle_s` have passed."""
    until = time.monotonic() + settle_s
    while (found := await audited(port, after, began, front, engine)).faults(
        baseline
    ) and time.monotonic() < until:
        await asyncio.sleep(0.5)
    return found


def golden_body(prompt: str) -> dict[str, Any]:
    """The request to `/generate` whose answer must always be the same."""
    sampling = {"temperature": 0, "max_new_tokens": GOLDEN_LEN, "ignore_eos": True}
    return {"text": prompt, "sampling_params": sampling, "return_logprob": True}


def golden_answer(answer: Any) -> str:
    """Its text and the log probability of each token, to the last bit: pages in another order
    change no word of the text, for attention hardly minds, but they change bits."""
    logprobs = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
    return json.dumps([answer["text"], logprobs])


async def golden(port: int) -> dict[str, str]:
    """Greedy continuations, computed by an idle engine with an empty cache."""
    await call(port, "POST", "/flush_cache?timeout=10")
    found = {}
    for prompt in PROMPTS:
        found[prompt] = golden_answer(await _post(port, "/generate", golden_body(prompt)))
    return found


async def _busy(port: int) -> bool:
    info = await _get(port, "/server_info")
    (state,) = info["internal_states"]
    return bool(
        state["num_total_reqs"] or info["open_completions"] or state["stats"].get("num_sessions")
    )


async def _get(port: int, path: str) -> Any:
    return _answer(path, *await call(port, "GET", path))


async def _post(port: int, path: str, body: object = None) -> Any:
    return _answer(path, *await call(port, "POST", path, body))


def _answer(path: str, status: int, answer: bytes) -> Any:
    if status != 200:
        raise Wrong(f"{path} answers {status} to the audit: {answer[:300]!r}")
    return json.loads(answer)
