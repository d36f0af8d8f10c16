"""Chats that have called tools: their KV stays for the pause that earlier ones let expect, within
the budget of pins, and no request waits for it."""

from __future__ import annotations

import random

from tests.scheduler.oracle_runner import expected_output
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.world import EOS, VOCAB
from weft.engine.explain import explain
from weft.messages.pins import ToolPause
from weft.scheduler.estimate.pauses import FIRST_S, MARGIN, MAX_TOOLS, PausesSeen
from weft.scheduler.features.tool_pauses import ToolPausesFeature
from weft.scheduler.settings import SchedulerSettings

PROMPT = [10 + number * 7 % 250 for number in range(61)]
OUTPUT_LEN = 4


def world(num_pages: int = 200, **settings: object) -> RecordedWorld:
    """400 tokens of memory, 200 of which may be pinned."""
    fields: dict[str, object] = {
        "num_pages": num_pages,
        "page_size": 2,
        "max_running_requests": 4,
        "context_length": 2 * num_pages,
        "vocab_size": VOCAB,
        "eos_token_ids": (EOS,),
        "max_pinned": 0.5,
        **settings,
    }
    return RecordedWorld(SchedulerSettings(**fields))  # type: ignore[arg-type]


def feature_of(it: RecordedWorld) -> ToolPausesFeature:
    return it.pins.pauses.feature


def call(it: RecordedWorld, prompt: list[int], *tools: str, tenant: str = "alice") -> list[int]:
    """A request that ends with calls of these tools. Returns its tokens."""
    output = expected_output(prompt, OUTPUT_LEN, VOCAB, {EOS})
    id = it.send(
        prompt, max_new_tokens=20, stop_token_ids=[output[-1]], may_pause=True, tenant=tenant
    )
    it.run_dry()
    assert it.finished[id].reason == "stop"
    if tools:
        it.tell(ToolPause(id=id, tools=tools))
    return [*prompt, *it.outputs[id]]


def flood(it: RecordedWorld, num_tokens: int) -> None:
    """Requests whose tokens nobody has sent before."""
    rng = random.Random(num_tokens)
    for _ in range(num_tokens // 60):
        prompt = [rng.randrange(VOCAB) for _ in range(50)]
        it.send(prompt, max_new_tokens=10, ignore_eos=True, user="bob")
    it.run_dry()


def cached(it: RecordedWorld, prompt: list[int], tenant: str = "alice") -> int:
    """Tokens that a request finds in the cache."""
    id = it.send(prompt, max_new_tokens=1, ignore_eos=True, tenant=tenant, may_pause=True)
    it.run_dry()
    return it.finished[id].cached_tokens


def notes(it: RecordedWorld, id: int) -> str:
    history = explain(it.scheduler, id, it.time)
    assert history is not None
    return "\n".join(entry.what for entry in history.timeline)


def test_a_chat_that_has_called_tools_is_there_after_a_flood_and_another_is_not() -> None:
    for tool_pause_s, tools, found in ((120.0, ("bash",), 64), (120.0, (), 0), (0.0, ("bash",), 0)):
        it = world(tool_pause_s=tool_pause_s)
        it.tick_s = 0.01
        tokens = call(it, PROMPT, *tools)
        flood(it, 2_000)
        assert cached(it, [*tokens, 1, 2, 3]) == found, (tool_pause_s, tools)
        assert feature_of(it).num_pinned == 0  # the client is back
        it.replay()


def test_the_time_is_that_of_earlier_pauses_of_this_tool_and_is_explained() -> None:
    it = world()
    it.tick_s = 0.001
    tokens = PROMPT
    for _ in range(4):
        tokens = call(it, tokens, "bash")
        it.time += 3.0
    tokens = call(it, tokens, "bash")
    last = max(it.sent)
    [chat] = [chat for chat in feature_of(it).chats.values() if chat.is_pinned]
    kept_s = chat.until_s - chat.began_s
    assert MARGIN * 3.0 <= kept_s < MARGIN * 3.1
    assert "are kept for a pause, 3.8 s: 90% of 4 pauses for bash took at most 3.0 s" in notes(
        it, last
    )
    it.time += 3.5
    it.step()
    assert chat.is_pinned
    it.time += 0.5
    it.step()
    assert not chat.is_pinned
    assert "the pause is longer than" in notes(it, last)
    # Another tool of the same client is expected to take as long, until its own pauses are known.
    call(it, [7, *PROMPT], "browse")
    assert "pauses of this client" in notes(it, max(it.sent))
    call(it, [8, *PROMPT], "browse", tenant="carol")
    assert "90% of 4 pauses took" in notes(it, max(it.sent))
    it.replay()


def test_a_pause_that_is_longer_than_allowed_is_learnt_and_its_kv_not_kept() -> None:
    it = world(tool_pause_s=30.0)
    tokens = PROMPT
    for _ in range(5):
        tokens = call(it, tokens, "ask_user")
        it.time += 300.0
        it.step()
        assert feature_of(it).num_pinned == 0
    call(it, tokens, "ask_user")
    assert feature_of(it).num_pinned == 0
    assert "at most 30.0 s are allowed" in notes(it, max(it.sent))
    it.replay()


def test_pauses_keep_to_the_budget_of_pins_and_pins_of_users_stay() -> None:
    it = world()
    mark = {"length": 60, "ttl_s": 1e6}
    it.send(PROMPT, pins=(mark,), max_new_tokens=2, ignore_eos=True)
    it.run_dry()
    chats = [[number, *PROMPT] for number in range(3)]
    for prompt in chats:
        call(it, prompt, "bash")
    # 200 tokens may be pinned, and the user's pin has 60: two chats of 66 fit.
    kept = [chat.prompt.num_tokens for chat in feature_of(it).chats.values() if chat.is_pinned]
    assert kept == [62, 62]
    assert it.pins.feature.book.num_pages(it.scheduler.kv) == 30
    call(it, [9] * 250, "bash")
    assert "pins have no room" in notes(it, max(it.sent))
    it.replay()


def test_a_request_that_needs_the_memory_of_a_pause_gets_it() -> None:
    it = world()
    call(it, PROMPT, "bash")
    assert feature_of(it).num_pinned == 1
    id = it.send([5] * 380, max_new_tokens=10, ignore_eos=True)
    it.run_dry()
    assert it.finished[id].reason == "length"
    assert feature_of(it).num_pinned == 0
    it.replay()


def test_a_client_that_is_back_keeps_its_kv_until_its_request_runs() -> None:
    it = world(max_running_requests=1)
    tokens = call(it, PROMPT, "bash")
    first = it.send([3] * 50, max_new_tokens=40, ignore_eos=True)
    it.step()
    again = it.send([*tokens, 1, 2, 3], max_new_tokens=2, tenant="alice", may_pause=True)
    it.time += 10 * FIRST_S
    it.run_dry()
    assert it.finished[first].reason == "length"
    assert it.finished[again].cached_tokens == 64
    gone = it.send([*tokens, 1], max_new_tokens=2, tenant="alice", may_pause=True)
    it.run_dry()
    assert gone in it.finished
    it.replay()


def test_random_chats_with_pauses_and_floods_are_replayed_and_lose_no_memory() -> None:
    rng = random.Random(5)
    it = world(num_pages=120, tenant_cache="alice=0.4")
    tools = ("bash", "read", "ask")
    chats = {name: [rng.randrange(VOCAB) for _ in range(30)] for name in ("alice", "bob", "carol")}
    for _ in range(60):
        name = rng.choice(list(chats))
        used = rng.sample(tools, rng.choice([0, 1, 2]))
        chats[name] = [*call(it, chats[name], *used, tenant=name), rng.randrange(VOCAB)]
        if len(chats[name]) > 90:
            chats[name] = chats[name][:30]
        if rng.random() < 0.3:
            flood(it, 180)
        it.tell(ToolPause(id=rng.randrange(99), tools=("nobody",)))
        it.time += rng.choice([0.1, 2.0, 40.0])
        it.step()
    feature = feature_of(it)
    assert feature.num_kept > 20
    assert feature.num_back > 5
    it.time += 1_000.0
    it.step()
    assert feature.num_pinned == 0
    it.check_idle()
    it.replay()


def test_what_is_learnt_of_pauses_is_bounded() -> None:
    seen = PausesSeen()
    for number in range(2 * MAX_TOOLS):
        seen.note("alice", (f"tool {number}",), 1.0)
    assert len(seen._pauses) == MAX_TOOLS
    assert seen.expected("alice", ["tool 3"]).seconds == MARGIN
    assert seen.expected("nobody", []).why.startswith("90% of 64 pauses took")
    assert PausesSeen().expected("alice", ["bash"]).seconds == FIRST_S
