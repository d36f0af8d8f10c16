"""Measures how smooth the live page is: a made-up engine of 200 steps a second with 64 rows, 50
that wait and 200 nodes, in a browser without a graphics card.

python -m tests.page.frames [seconds]

Frames are those that the browser asks for (`requestAnimationFrame`). The work of a frame or of a
picture is that of the page's main thread, as the browser's own trace has it: it does not depend on
how pixels come to the screen.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, NamedTuple

import numpy as np

from tests.page.browser import SIZE, Watched, find, started
from tests.server.fake import running
from tests.server.pictured import pictured
from weft.messages.picture import Picture, QueueColumns, RowColumns, StepColumns, TreeColumns
from weft.messages.status import Stats

STEPS = 40  # in each picture, of which there are five a second
ROWS = 64
WAITING = 50
NODES = 200
CATEGORIES = ["toplevel", "devtools.timeline", "disabled-by-default-devtools.timeline"]
COUNT = """() => {
  window.frames_seen = [];
  let last = performance.now();
  const next = (now) => { window.frames_seen.push(now - last); last = now; requestAnimationFrame(next); };
  requestAnimationFrame(next);
}"""


def ints(values: Any) -> bytes:
    return np.asarray(values, dtype=np.int32).tobytes()


def longs(values: Any) -> bytes:
    return np.asarray(values, dtype=np.int64).tobytes()


def floats(values: Any) -> bytes:
    return np.asarray(values, dtype=np.float32).tobytes()


def picture(number: int) -> Picture:
    """The `number`th: all rows go on, and every sixteenth changes hands."""
    rng = np.random.default_rng(number)
    first = number * STEPS
    rows = np.arange(ROWS)
    places = number + rows  # each row has another request after so many pictures
    output = 40 * (places % 16) + 20
    return Picture(
        at_s=number / 5,
        stats=stats(number),
        steps=StepColumns(
            numbers=longs(first + np.arange(STEPS)),
            modes=ints(np.full(STEPS, 1)),
            num_rows=ints(np.full(STEPS, ROWS)),
            num_prompts=ints(rng.integers(0, 2, STEPS)),
            num_tokens=ints(ROWS + rng.integers(0, 500, STEPS)),
            num_waiting=ints(np.full(STEPS, WAITING)),
            seconds=floats(rng.uniform(0.003, 0.009, STEPS)),
        ),
        rows=RowColumns(
            rids=[f"request-{row}-{place // 16}" for row, place in enumerate(places)],
            tenants=[f"user {row % 7}" for row in rows],
            is_decoding=ints(np.ones(ROWS)),
            prompt_len=ints(np.full(ROWS, 300)),
            cached_len=ints(np.full(ROWS, 96)),
            kv_len=ints(300 + output),
            fill_len=ints(np.full(ROWS, 300)),
            num_output=ints(output),
            max_len=ints(np.full(ROWS, 1000)),
            age_s=floats(output / 200),
        ),
        queue=QueueColumns(
            rids=[f"waits-{number // 5 + place}" for place in range(WAITING)],
            reasons=["waits: no KV memory: it needs 3,100 tokens, 2,900 are free"] * WAITING,
            age_s=floats(np.arange(WAITING)[::-1] / 2),
        ),
        tree=tree(number // 5 + 1) if number % 5 == 0 else None,
    )


def stats(number: int) -> Stats:
    steps = (number + 1) * STEPS
    return Stats(
        num_running=ROWS,
        num_waiting=WAITING,
        kv_tokens=100_000,
        kv_used=40_000 + 50 * (number % 100),
        kv_evictable=30_000,
        max_running_requests=256,
        total_steps=steps,
        total_generated_tokens=steps * ROWS,
        total_prompt_tokens=steps * 120,
        total_cached_tokens=steps * 60,
    )


def tree(round: int) -> TreeColumns:
    parents = np.maximum((np.arange(NODES) - 1) // 3, -1)
    parents[0] = -1
    own = np.full(NODES, 32)
    below = own.astype(np.int64)
    for node in range(NODES - 1, 0, -1):
        below[parents[node]] += below[node]
    return TreeColumns(
        round=round,
        num_nodes=NODES,
        parents=ints(parents),
        num_tokens=ints(own),
        num_below=longs(below),
        ages=longs((np.arange(NODES) * 7 + round) % 90),
        locks=ints(np.arange(NODES) % 3 == 0),
        pins=ints(np.zeros(NODES)),
        heads=[
            ints(np.frombuffer(f"prefix number {node:4d}".encode(), np.uint8))
            for node in range(NODES)
        ],
    )


class Task(NamedTuple):
    """What the page's main thread did without a pause."""

    begin_us: float
    ms: float
    parts: dict[str, float]  # milliseconds of each kind of work, without those within it


def tasks(trace: bytes) -> list[Task]:
    """The tasks of the page's main thread, as they ran."""
    events = json.loads(trace)["traceEvents"]
    threads = {
        (one["pid"], one["tid"])
        for one in events
        if one.get("name") == "thread_name" and one["args"]["name"] == "CrRendererMain"
    }
    runs = [one for one in events if one.get("ph") == "X" and (one["pid"], one["tid"]) in threads]
    found: list[Task] = []
    around: list[tuple[float, str]] = []  # end and name of the events that are open
    for one in sorted(runs, key=lambda one: (one["ts"], -one["dur"])):
        while around and around[-1][0] <= one["ts"]:
            around.pop()
        name = one["name"]
        if name == "RunTask" and not around:
            found.append(Task(one["ts"], one["dur"] / 1e3, {}))
        if found and (around or name == "RunTask"):
            parts = found[-1].parts
            parts[name] = parts.get(name, 0.0) + one["dur"] / 1e3
            if around:
                parts[around[-1][1]] -= one["dur"] / 1e3
            around.append((one["ts"] + one["dur"], name))
    return found


def made_of(found: list[Task]) -> str:
    """The kinds of work that most of the time of some tasks goes to."""
    total: dict[str, float] = {}
    for task in found:
        for name, ms in task.parts.items():
            total[name] = total.get(name, 0.0) + ms
    whole = sum(total.values())
    most = sorted(total, key=total.__getitem__, reverse=True)[:8]
    return ", ".join(f"{name} {100 * total[name] / whole:.0f} %" for name in most)


def counters(devtools: Any) -> dict[str, float]:
    """What the browser has counted for the main thread of the page, in seconds."""
    metrics = devtools.send("Performance.getMetrics")["metrics"]
    return {one["name"]: one["value"] for one in metrics}


def told(name: str, values: list[float]) -> str:
    low, middle, high = np.percentile(values, [50, 95, 99])
    return f"{name}: median {low:.2f} ms, p95 {middle:.2f}, p99 {high:.2f}, most {max(values):.2f}"


def measure(browser: Any, seconds: float) -> None:
    with running() as server:
        pictured(server, make=lambda number, rank: picture(number))
        context = browser.new_context(viewport=SIZE, color_scheme="dark")
        page = Watched(context.new_page(), server.url).open().live()
        time.sleep(3.0)  # the strip is full
        page.page.evaluate(COUNT)
        devtools = context.new_cdp_session(page.page)
        devtools.send("Performance.enable")
        before = counters(devtools)
        time.sleep(seconds)
        spent = {name: value - before[name] for name, value in counters(devtools).items()}
        frames = page.page.evaluate("() => window.frames_seen.slice(5)")
        late = sum(one > 25 for one in frames) / len(frames)
        per_s = len(frames) / sum(frames) * 1e3
        print(told(f"{per_s:.1f} frames a second, {100 * late:.1f} % later than 25 ms", frames))
        for name in ("Task", "Script", "RecalcStyle", "Layout"):
            share_ms = spent[f"{name}Duration"] / spent["Timestamp"] * 1e3
            print(f"{name}: {share_ms:.0f} ms a second, {share_ms / 5:.1f} a picture")
        browser.start_tracing(page=page.page, categories=CATEGORIES)
        time.sleep(seconds)
        found = tasks(browser.stop_tracing())
        span_s = (found[-1].begin_us - found[0].begin_us) / 1e6
        busy = [task.ms for task in found if task.ms > 0.2]
        print(told(f"traced, {len(busy) / span_s:.0f} tasks a second over 0.2 ms", busy))
        for most_ms in (8, 16):
            long = [task for task in found if task.ms > most_ms]
            print(f"traced, tasks over {most_ms} ms: {len(long) / span_s:.2f} a second")
            if long:
                print(f"  made of {made_of(long)}")
        page.check()
        context.close()


def main() -> None:
    path = find()
    if path is None:
        raise SystemExit("there is no browser: apt install chromium")
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 8.0
    with started(path) as browser:
        measure(browser, seconds)


if __name__ == "__main__":
    main()
