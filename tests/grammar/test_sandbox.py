"""The process in which a grammar is tried: bombs cost it, and nobody else, a bounded time."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.engine.engine_world import EngineWorld
from tests.scheduler.scenes import settings
from weft.grammar.llg import LlgCompiler
from weft.grammar.pool import GrammarPool
from weft.grammar.protocol import CompileResult, InvalidGrammar, Key
from weft.grammar.sandbox import SandboxFailed, SandboxProcess
from weft.messages.sampling import Grammar

VOCABULARY = Path(weft.__file__).parent / "bundled" / "weft-nano" / "tokenizer.json", 4_096, (0,)
TIMEOUT_S = 1.0
BOMB_S = 0.2  # of a processor, for each of many bombs


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _names(number: int) -> list[str]:
    return [f"value_{7_919 * i}" for i in range(number)]


OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2_000)}}
REFS = {
    f"d{i}": {"anyOf": 2 * [{"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}]}
    for i in range(300)
}
PRODUCT = [
    {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(8)]}
    for i in range(8)
]
BOMBS = {
    "enum of 100,000": Key("json_schema", json.dumps({"enum": _names(100_000)})),
    "2,000 optional properties": Key(
        "json_schema", json.dumps({**OPTIONAL, "additionalProperties": False})
    ),
    "nested counts": Key("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "counts around a letter": Key("regex", ".{1,5000}x.{1,5000}"),
    "a long count": Key("regex", "[a-z]{100000}"),
    "a million items": Key(
        "json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 1000000}'
    ),
    "depth 60": Key("json_schema", json.dumps(_deep(60))),
    "depth 300": Key("json_schema", json.dumps(_deep(300))),
    "remote reference": Key("json_schema", '{"$ref": "http://192.0.2.1/x.json"}'),
    "nested references": Key(
        "json_schema", json.dumps({"$defs": {**REFS, "d300": {}}, "$ref": "#/$defs/d0"})
    ),
    "product of choices": Key("json_schema", json.dumps({"allOf": PRODUCT})),
    "rules of counts": Key("ebnf", 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"{1,1000}'),
    "30,000 rules": Key("ebnf", "start: " + " | ".join(map(json.dumps, _names(30_000)))),
    "100,000 rules": Key("ebnf", "start: " + " | ".join(map(json.dumps, _names(100_000)))),
    "100,000 choices": Key("choice", json.dumps(_names(100_000))),
    "brackets": Key("regex", "(" * 20_000 + ")" * 20_000),
}


@pytest.fixture
def sandbox() -> Iterator[SandboxProcess]:
    sandbox = SandboxProcess("llguidance", *VOCABULARY, timeout_s=TIMEOUT_S)
    yield sandbox
    sandbox.close()


def test_a_trial_says_what_compiles_and_why_another_does_not(sandbox: SandboxProcess) -> None:
    sandbox.run(Key("regex", "a+"))
    with pytest.raises(InvalidGrammar, match="unclosed group"):
        sandbox.run(Key("regex", "(a"))
    sandbox.run(Key("choice", '["größe"]'))


def test_a_trial_that_takes_too_long_is_killed_and_the_next_one_runs(
    sandbox: SandboxProcess,
) -> None:
    sandbox.run(Key("regex", "a+"))
    sandbox._timeout_s = 0.001
    with pytest.raises(SandboxFailed, match=r"takes longer than 0\.001 s"):
        sandbox.run(BOMBS["100,000 rules"])
    sandbox._timeout_s = TIMEOUT_S
    sandbox.run(Key("regex", "a+"))


def test_a_process_that_dies_between_two_trials_costs_neither(sandbox: SandboxProcess) -> None:
    sandbox.run(Key("regex", "a+"))
    child = sandbox._helper.child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    child._process.wait()
    sandbox.run(Key("regex", "b+"))


def test_bombs_are_refused_or_served_in_bounded_time_and_memory_while_others_go_on() -> None:
    rung = threading.Event()
    pool = GrammarPool(
        partial(LlgCompiler, *VOCABULARY),
        clock=lambda: 0.0,  # nobody waits too long
        max_bytes=64_000_000,
        make_sandbox=partial(SandboxProcess, "llguidance", *VOCABULARY, BOMB_S),
        notify=rung.set,
    )
    world = EngineWorld(
        settings(context_length=4_000, num_pages=20_000, max_running_requests=40), grammars=pool
    )
    runs = world.send([5, 6, 7], max_new_tokens=3_900, ignore_eos=True)
    ids = {
        name: world.send([1, 2], grammar=_grammar(key), max_new_tokens=3)
        for name, key in BOMBS.items()
    }
    ends: dict[str, float] = {}
    longest = 0.0
    began = time.perf_counter()
    while len(ends) < len(ids) and time.perf_counter() - began < 2_000:
        step_began = time.thread_time()
        world.step(check=False)
        longest = max(longest, time.thread_time() - step_began)
        left = {
            name for name, id in ids.items() if id in world.engine.services.grammars.feature.queue
        }
        ends |= {
            name: time.perf_counter() - began
            for name in ids
            if name not in left and name not in ends
        }
        time.sleep(0.001)
    pool.close()
    assert len(ends) == len(ids), set(ids) - set(ends)
    assert len(world.outputs[runs]) > 50, "others stood still"
    assert longest < 0.5  # seconds of a processor, for a step of the engine's own thread
    assert pool.cache.num_bytes <= 64_000_000
    refused = {
        name
        for name, id in ids.items()
        if id in world.finished and world.finished[id].status == 400
    }
    assert {"enum of 100,000", "depth 300", "remote reference", "100,000 rules"} <= refused


def test_what_only_looks_like_a_bomb_is_served() -> None:
    sandbox = SandboxProcess("llguidance", *VOCABULARY, timeout_s=600)
    for name in ("nested counts", "a million items", "depth 60", "a long count"):
        sandbox.run(BOMBS[name])
    sandbox.close()


def _grammar(key: Key) -> Grammar:
    return Grammar(key.kind, key.text)  # type: ignore[arg-type]


def test_many_schemas_stay_within_the_bytes_of_the_cache() -> None:
    rung = threading.Event()
    pool = GrammarPool(
        partial(LlgCompiler, *VOCABULARY), max_bytes=5_000_000, notify=rung.set, clock=lambda: 0.0
    )
    verdicts: list[CompileResult] = []
    for id in range(300):
        pool.ask(
            id,
            Key(
                "json_schema",
                json.dumps({"type": "object", "properties": {f"a{id}": {"type": "string"}}}),
            ),
        )
    while len(verdicts) < 300:
        assert rung.wait(240)
        verdicts += pool.take()
    assert all(verdict.constraint is not None for verdict in verdicts)
    assert pool.cache.num_bytes <= 5_000_000
    assert 20 < len(pool.cache) < 100
    assert np.count_nonzero(verdicts[0].constraint.mask.words if verdicts[0].constraint else 0)
    pool.close()
