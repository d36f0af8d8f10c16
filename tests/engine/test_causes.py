"""Why prompts missed the cache: planted causes, and random requests against a comparison of whole
prompts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.group_world import both
from tests.scheduler.media_scenes import run as run_media
from tests.scheduler.media_scenes import settings as media_settings
from tests.scheduler.random_worlds import picture
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from tests.scheduler.world import World
from weft.arrays import IntArray
from weft.engine import causes
from weft.engine import explain as insight
from weft.engine.causes import ADVICE, RUN_LEN, Cause, common_len, find_holder
from weft.memory.prefix_cache import shared_len
from weft.messages.control import CacheCause, PrefixHolder
from weft.scheduler import history
from weft.scheduler.settings import PoolingLimits

DOCS = Path(__file__).parents[2] / "docs"
PAGE = 4
HEAD = list(range(100, 140))
TAIL = list(range(200, 280))
QUESTION = list(range(300, 320))


def world_of(**changes: object) -> World:
    wide = {"num_pages": 400, "page_size": PAGE, "context_length": 600, "vocab_size": 1_000}
    return World(settings(**(wide | changes)))


def run(world: World, prompt: Sequence[int], **wishes: Any) -> int:
    asked: dict[str, Any] = {"max_new_tokens": 2, "ignore_eos": True, **wishes}
    id = world.send(list(prompt), **asked)
    world.run_dry()
    return id


def cause(world: World, id: int) -> CacheCause:
    explained = insight.explain(world.scheduler, id, world.time)
    assert explained is not None
    assert explained.cache_cause is not None
    return explained.cache_cause


def found(world: World, prompt: Sequence[int], **wishes: object) -> CacheCause:
    return cause(world, run(world, prompt, **wishes))


def test_a_prompt_that_nobody_has_sent_is_seen_first() -> None:
    world = world_of()
    one = found(world, HEAD)
    assert one.cause == Cause.FIRST_SEEN
    assert one.rid == ""
    assert one.missed_tokens == 0
    other = found(world, [*HEAD[:2], *TAIL])
    assert other.cause == Cause.FIRST_SEEN
    assert other.missed_tokens == 0


def test_a_prompt_that_is_sent_again_is_found() -> None:
    world = world_of()
    run(world, HEAD)
    one = found(world, HEAD)
    assert one.cause == Cause.FOUND
    assert one.missed_tokens == 0
    assert one.advice == ""


def test_the_next_turn_continues_the_last_one() -> None:
    world = world_of()
    first = run(world, HEAD)
    one = found(world, [*HEAD, *world.outputs[first], *QUESTION])
    assert one.cause == Cause.CONTINUED
    assert one.rid == "r0"
    assert one.missed_tokens == 0
    assert one.same_tokens == len(HEAD) + 2


def test_another_question_behind_the_same_head_has_missed_nothing() -> None:
    world = world_of()
    run(world, [*HEAD, *TAIL])
    one = found(world, [*HEAD, *QUESTION])
    assert one.cause == Cause.NEW_TEXT
    assert one.same_tokens == len(HEAD)
    assert one.missed_tokens == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "name"),
    [
        ([1, 2], [3, 4], Cause.CHANGED),
        ([1, 2, 3], [4], Cause.CHANGED),
        ([1, 2, 3], [], Cause.INSERTED),
        ([], [1, 2], Cause.DROPPED),
    ],
)
def test_a_change_in_the_middle_costs_all_that_follows(
    ours: list[int], theirs: list[int], name: Cause
) -> None:
    world = world_of()
    run(world, [*HEAD, *theirs, *TAIL])
    one = found(world, [*HEAD, *ours, *TAIL, *QUESTION])
    assert one.cause == name
    assert one.rid == "r0"
    assert one.same_tokens == len(HEAD)
    assert one.changed_tokens == len(ours)
    assert one.replaced_tokens == len(theirs)
    assert one.missed_tokens == len(TAIL)
    assert one.advice == ADVICE[name] != ""
    assert one.missed_s is not None


def test_a_change_in_the_first_page_is_no_first_sight() -> None:
    world = world_of()
    run(world, [1, 2, *HEAD, *TAIL])
    one = found(world, [1, 3, *HEAD, *TAIL])
    assert one.cause == Cause.CHANGED
    assert one.same_tokens == 1
    assert one.missed_tokens == (len(HEAD) + len(TAIL)) // PAGE * PAGE


def test_tools_in_another_order_are_said_to_be_so() -> None:
    world = world_of()
    first, second, third = [list(range(start, start + 32)) for start in (400, 440, 480)]
    run(world, [*HEAD, *first, *second, *third, *QUESTION])
    one = found(world, [*HEAD, *third, *second, *first, *QUESTION])
    assert one.cause == Cause.REORDERED
    assert one.same_tokens == len(HEAD)
    assert one.missed_tokens == 3 * 32 + len(QUESTION) // 16 * 16


def test_two_changes_of_which_the_first_is_as_long_as_the_rest_are_no_other_order() -> None:
    for length, name in ((32, Cause.CHANGED), (48, Cause.REORDERED)):
        world = world_of()
        run(world, [*HEAD, *range(400, 416), *TAIL[:32], *range(420, 436), *TAIL[32 : 32 + length]])
        one = found(
            world, [*HEAD, *range(500, 516), *TAIL[:32], *range(520, 536), *TAIL[32 : 32 + length]]
        )
        assert one.cause == name, length


def test_another_salt_hides_a_prompt() -> None:
    world = world_of()
    run(world, [*HEAD, *TAIL])
    one = found(world, [*HEAD, *TAIL], salt="mine")
    assert one.cause == Cause.OTHER_NAMESPACE
    assert one.rid == "r0"
    assert one.missed_tokens == (len(HEAD) + len(TAIL) - 1) // PAGE * PAGE
    again = found(world, [*HEAD, *TAIL], salt="mine")
    assert again.cause == Cause.FOUND


def test_what_was_evicted_is_named() -> None:
    world = world_of(num_pages=50)
    run(world, [*HEAD, *TAIL])
    run(world, list(range(400, 560)))
    one = found(world, [*HEAD, *TAIL])
    assert one.cause == Cause.EVICTED
    assert one.rid == "r0"
    assert one.missed_tokens > 0


def test_an_emptied_cache_is_named() -> None:
    world = world_of()
    run(world, [*HEAD, *TAIL])
    assert world.scheduler.flush_cache()
    one = found(world, [*HEAD, *TAIL])
    assert one.cause == Cause.EMPTIED
    assert one.rid == "r0"
    assert one.missed_tokens == 116
    assert found(world, [*HEAD, *TAIL]).cause == Cause.FOUND


def test_what_another_request_is_still_writing_is_named() -> None:
    world = world_of()
    first = world.send(HEAD, max_new_tokens=60, ignore_eos=True)
    while len(world.outputs[first]) < 30:
        world.step()
    prompt = [*HEAD, *world.outputs[first][:28], *QUESTION]
    second = world.send(prompt, max_new_tokens=2, ignore_eos=True)
    world.run_dry()
    one = cause(world, second)
    assert one.cause == Cause.COMPUTING
    assert one.rid == "r0"
    assert one.same_tokens == len(HEAD) + 28
    assert one.missed_tokens == len(HEAD) + 28 - world.finished[second].cached_tokens == 28


def test_asked_for_log_probabilities_of_the_prompt_it_is_computed_again() -> None:
    world = world_of()
    run(world, [*HEAD, *TAIL])
    one = found(world, [*HEAD, *TAIL], prompt_logprobs=0, prompt_logprobs_start=8)
    assert one.cause == Cause.RECOMPUTED
    assert one.missed_tokens == 108


def test_without_a_cache_nothing_can_be_found() -> None:
    world = world_of(prefix_cache=False)
    run(world, HEAD)
    again = run(world, HEAD)
    one = cause(world, again)
    assert one.cause == Cause.CACHE_OFF
    assert "--no-prefix-cache" in one.advice
    world.scheduler.settings = replace(world.scheduler.settings, pooling=PoolingLimits(size=8))
    assert not cause(world, again).advice  # a model of vectors may have no cache by itself


def test_another_picture_at_the_same_place_is_named() -> None:
    world = RecordedWorld(media_settings())
    text = range(20, 60)
    run_media(world, *text, 1_001, *text)
    run_media(world, *text, 1_002, *text)
    one = cause(world, 1)
    assert one.cause == Cause.OTHER_MEDIA
    assert one.rid == "r0"
    assert one.same_tokens == len(text)
    assert one.changed_tokens == picture(2, 0).length
    assert one.replaced_tokens == picture(1, 0).length
    assert one.missed_tokens == len(text)


def test_a_cached_prompt_without_a_snapshot_is_named() -> None:
    world = World(both())
    prompt = list(range(10, 210))
    run(world, prompt)
    run(world, [*prompt[:150], *range(20, 60)])
    one = cause(world, 1)
    assert one.cause == Cause.NO_RESUME_POINT
    assert one.same_tokens == 150
    assert one.missed_tokens == 144 - world.finished[1].cached_tokens > 0


def test_a_request_that_waits_has_no_cause_yet() -> None:
    world = world_of(max_running_requests=1)
    world.send(HEAD, max_new_tokens=20, ignore_eos=True)
    waiting = world.send(TAIL, max_new_tokens=2)
    world.step()
    explained = insight.explain(world.scheduler, waiting, world.time)
    assert explained is not None
    assert explained.cache_cause is None


def test_remembered_sequences_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_KEY_BYTES", 2_000)
    world = world_of()
    for number in range(12):
        run(world, [number * 60 + token for token in range(60)])
    kept = [one.key for one in world.scheduler.history.traces() if one.key is not None]
    assert 0 < sum(len(key.tokens) for key in kept) <= 2_000
    assert cause(world, 11).cause == Cause.FIRST_SEEN


@pytest.mark.parametrize("seed", range(40))
def test_causes_agree_with_a_comparison_of_whole_prompts(seed: int) -> None:
    rng = random.Random(seed)
    world = world_of(num_pages=rng.choice([80, 400]), vocab_size=1_000)
    heads = [[rng.randrange(10, 900) for _ in range(60)] for _ in range(3)]
    sent: list[tuple[str, list[int]]] = []
    for _ in range(25):
        prompt = list(rng.choice(heads)[: rng.randrange(1, 60)])
        prompt += [rng.randrange(10, 900) for _ in range(rng.randrange(1, 40))]
        if sent and rng.random() < 0.4:
            prompt = edited(rng, rng.choice(sent)[1])
        salt = rng.choice(["", "", "a"])
        id = run(world, prompt, salt=salt)
        one = cause(world, id)
        earlier = [(name, tokens[: len(prompt)]) for name, tokens in sent]
        shared = {
            is_same: max(
                (_same(prompt, tokens) for name, tokens in earlier if (name == salt) == is_same),
                default=0,
            )
            for is_same in (True, False)
        }
        trace = world.scheduler.history.trace(id)
        assert trace is not None
        limit = (len(prompt) - 1) // PAGE * PAGE
        lost = min(shared[True] // PAGE * PAGE, limit) - trace.cached_tokens
        hidden = min(shared[False] // PAGE * PAGE, limit) - trace.cached_tokens
        if one.cause == Cause.OTHER_NAMESPACE:
            assert one.missed_tokens == hidden > max(lost, 0)
        elif lost > 0:
            assert one.cause == Cause.EVICTED
            assert one.missed_tokens == lost
        else:
            assert one.cause not in (Cause.EVICTED, Cause.EMPTIED, Cause.COMPUTING)
        if one.cause in (Cause.CHANGED, Cause.INSERTED, Cause.DROPPED):
            assert one.same_tokens == shared[True]
            begin = shared[True]
            nearest = [
                tokens[begin:]
                for name, tokens in sent
                if name == salt and _same(prompt, tokens) == begin
            ]
            changed = (one.changed_tokens, one.replaced_tokens)
            assert changed in [_fewest(prompt[begin:], theirs) for theirs in nearest]
        sent.append((salt, [*prompt, *world.outputs[id]]))


def edited(rng: random.Random, tokens: list[int]) -> list[int]:
    """The tokens with some of them changed, left out, or with new ones among them."""
    at = rng.randrange(len(tokens))
    until = at + rng.randrange(4)
    new = [rng.randrange(10, 900) for _ in range(rng.randrange(4))]
    return [*tokens[:at], *new, *tokens[until:], 905]


def _fewest(ours: list[int], theirs: list[int]) -> tuple[int, int]:
    """The fewest tokens of both after which `RUN_LEN` are the same."""
    pairs = itertools.product(range(len(ours)), range(len(theirs)))
    found = [(i, j) for i, j in pairs if _same(ours[i:], theirs[j:]) >= RUN_LEN]
    return min(found, key=lambda pair: (sum(pair), pair[0]), default=(len(ours), len(theirs)))


def _same(one: list[int], other: list[int]) -> int:
    for count, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs:
            return count
    return min(len(one), len(other))


def test_common_tokens_are_counted_whole() -> None:
    def packed(*ids: int) -> bytes:
        return b"".join(id.to_bytes(4, "little") for id in ids)

    assert common_len(packed(1, 2, 3), packed(1, 2, 3)) == 3
    assert common_len(packed(1, 2, 3), packed(1, 2)) == 2
    assert common_len(packed(1, 2, 3), packed(1, 258, 3)) == 1
    assert common_len(packed(1), b"") == 0


def test_a_beginning_in_common_is_counted_in_whole_pieces() -> None:
    for tail in range(8):
        one = b"abcd" * 3 + b"x" * tail
        other = b"abcd" * 3 + b"y" * tail
        assert shared_len(one, 0, len(one), other, 4) == 12, tail
        assert shared_len(b"--" + one, 2, 2 + len(one), one, 4) == len(one), "one is the other"
    assert shared_len(b"xbcd", 0, 4, b"abcd", 4) == 0
    assert shared_len(b"abcdx", 0, 5, b"abcdy", 4) == 4


def test_only_the_newest_requests_of_a_name_are_compared_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of()
    for number in range(30):
        run(world, [*HEAD, 500 + number, *TAIL], rid="same")
    num_compared = 0

    def counted(one: bytes, other: bytes) -> int:
        nonlocal num_compared
        num_compared += 1
        return common_len(one, other)

    monkeypatch.setattr(causes, "common_len", counted)
    explained = insight.trace_request_flow(world.scheduler, "same", world.time)
    found = [one.cache_cause is not None for one in explained]
    assert found == [True] * 8 + [False] * 22
    assert num_compared <= 8 * (30 + 1), "each with all before it, and once behind the change"
    oldest = explained[-1]
    assert cause(world, oldest.id).cause == Cause.FIRST_SEEN, "found when it is asked for alone"


def test_runs_are_looked_for_in_a_bounded_part_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "MAX_RUNS_LEN", 32)
    looked_at: list[int] = []
    runs = causes._runs

    def counted(tokens: bytes) -> IntArray:
        looked_at.append(len(tokens) // 4)
        return runs(tokens)

    monkeypatch.setattr(causes, "_runs", counted)
    world = world_of()
    run(world, [*HEAD, *TAIL, *QUESTION])
    found(world, [*HEAD, *QUESTION, *TAIL])
    assert looked_at == [32, 32]


def test_a_run_of_sixteen_tokens_is_the_same_again_and_a_shorter_one_is_an_accident() -> None:
    for length, name in ((RUN_LEN - 1, Cause.NEW_TEXT), (RUN_LEN, Cause.CHANGED)):
        world = world_of()
        run(world, [*HEAD, 1, *TAIL[:length]])
        one = found(world, [*HEAD, 2, *TAIL[:length], 3, *QUESTION])
        assert one.cause == name, length


def test_the_limits_of_a_change_are_those_that_users_read() -> None:
    page = (DOCS / "guides" / "why-slow.md").read_text("utf-8")
    assert f"at least {RUN_LEN} tokens after them are the same again" in page
    assert f"the change ends within {causes.MAX_SPAN:,} tokens" in page
    assert f"the last {history.MAX_FINISHED:,} that ended" in page
    for name in Cause:
        assert f"`{name}`" in page, name
        assert name in ADVICE


def test_a_change_ends_within_a_bounded_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "MAX_SPAN", 8)
    for length, is_found in ((8, True), (9, False)):
        world = world_of()
        run(world, [*HEAD, *range(400, 400 + length), *TAIL])
        one = found(world, [*HEAD, *range(500, 500 + length), *TAIL])
        assert (one.changed_tokens == length) is is_found, length
        # Beyond it, the text is still known to be there, but not where.
        assert one.cause == (Cause.CHANGED if is_found else Cause.REORDERED), length


def test_of_equal_requests_the_one_that_ended_first_is_named_and_an_open_one_last() -> None:
    world = world_of()
    late = world.send([*HEAD, 1, *TAIL], max_new_tokens=30, ignore_eos=True, rid="late")
    world.step()
    run(world, [*HEAD, 2, *TAIL], rid="later", max_new_tokens=40)
    assert late in world.finished
    run(world, [*HEAD, 3, *TAIL], rid="latest")
    assert found(world, [*HEAD, 4, *TAIL]).rid == "late"


def test_a_request_that_is_still_open_is_named_after_those_that_have_ended() -> None:
    world = world_of()
    still = world.send([*HEAD, 1, *TAIL], max_new_tokens=60, ignore_eos=True, rid="open")
    world.step()
    world.send([*HEAD, 2, *TAIL], max_new_tokens=3, ignore_eos=True, rid="ended")
    for _ in range(6):
        world.step()
    third = world.send([*HEAD, 3, *TAIL], max_new_tokens=1)
    for _ in range(3):
        world.step()
    assert still not in world.finished
    assert cause(world, third).rid == "ended"


def test_of_requests_that_ended_in_one_step_or_are_all_open_the_first_is_named() -> None:
    world = world_of()
    for number, name in enumerate(("first", "second")):
        world.send([*HEAD, number, *TAIL], max_new_tokens=2, ignore_eos=True, rid=name)
    world.run_dry()
    ended = [trace.finished_s for trace in world.scheduler.history.traces()]
    assert ended[0] == ended[1]
    assert found(world, [*HEAD, 3, *TAIL]).rid == "first"
    world = world_of()
    for number, name in enumerate(("first", "second")):
        world.send([*HEAD, number, *TAIL], max_new_tokens=60, ignore_eos=True, rid=name)
        world.step()
    third = world.send([*HEAD, 3, *TAIL], max_new_tokens=1)
    world.step()
    world.step()
    assert cause(world, third).rid == "first"


def test_a_longer_beginning_counts_more_than_an_earlier_end() -> None:
    world = world_of()
    run(world, [*HEAD[:20], 1, *TAIL], rid="first")
    run(world, [*HEAD, 2, *TAIL], rid="second")
    assert found(world, [*HEAD, 3, *TAIL]).rid == "second"


@pytest.mark.parametrize("adapters", [("", "a1"), ("a1", "b2")])
def test_another_adapter_hides_a_prompt(adapters: tuple[str, str]) -> None:
    world = world_of()
    ids = []
    for adapter in (*adapters, adapters[1]):
        ids.append(world.send([*HEAD, *TAIL], max_new_tokens=2, ignore_eos=True, adapter=adapter))
        world.run_dry(check=False)  # the model of this world has no adapters
    one = cause(world, ids[1])
    assert one.cause == Cause.OTHER_NAMESPACE
    assert one.rid == "r0"
    assert cause(world, ids[2]).cause == Cause.FOUND


def test_a_change_is_named_for_a_model_with_windows_and_states() -> None:
    world = World(both())
    run(world, [*range(10, 110), 5, *range(110, 150)])
    one = found(world, [*range(10, 110), 6, *range(110, 150)])
    assert (one.cause, one.same_tokens) in ((Cause.CHANGED, 100), (Cause.NO_RESUME_POINT, 100))


# What a client is told of requests of others


def seen_by(world: World, id: int, viewer: str | None) -> CacheCause:
    (one,) = insight.trace_request_flow(
        world.scheduler, f"r{id}", world.time, number=id, viewer=viewer
    )
    assert one.cache_cause is not None
    return one.cache_cause


def test_of_requests_of_others_only_pages_in_common_are_told() -> None:
    world = world_of()
    run(world, [*HEAD, 1, *TAIL], tenant="ann", rid="secret")
    id = run(world, [*HEAD, *range(1, 3), *TAIL], tenant="bob")
    for stranger in ("bob", ""):
        one = seen_by(world, id, stranger)
        assert (one.cause, one.rid, one.theirs) == (Cause.NEW_TEXT, "", [])
        assert (one.changed_tokens, one.replaced_tokens, one.missed_tokens) == (0, 0, 0)
        assert (
            one.words == "its first 40 tokens are those of another request; then it has other text"
        )
    for viewer in ("ann", None):
        one = seen_by(world, id, viewer)
        assert (one.cause, one.rid, one.same_tokens) == (Cause.INSERTED, "secret", 41)
        assert one.theirs[: len(TAIL)] == TAIL[:24]


SECRET = [901, 902, 903]


def guesses() -> list[list[int]]:
    """Prompts of a client that knows what stands before and after a secret: a wrong guess, and
    guesses with some of its tokens, in its place or in runs with what stands around it."""
    wrong = [801, 802, 803]
    found = [wrong, [901, 802, 803], [901, 902, 803], [801], [801, *SECRET[1:]], []]
    runs = [[*HEAD[-RUN_LEN + 1 :], token] for token in (801, 901)]
    ends = [[token, *TAIL[: RUN_LEN - 1]] for token in (803, 903)]
    return [[*HEAD, *one, *TAIL] for one in found] + [[*HEAD, 7, *one] for one in (*runs, *ends)]


@pytest.mark.parametrize("has_own", [False, True], ids=["strangers", "own-request-beside"])
@pytest.mark.parametrize("viewer", ["bob", ""])
def test_no_answer_depends_on_a_guess_at_a_text_of_others(viewer: str, has_own: bool) -> None:
    answers: list[set[tuple[object, ...]]] = []
    for secret in (SECRET, [701, 702, 703]):
        told: set[tuple[object, ...]] = set()
        for number, guess in enumerate(guesses()):
            world = world_of()
            run(world, [*HEAD, *secret, *TAIL], tenant="ann", rid="hers")
            if has_own:
                run(world, [*HEAD, 7, *QUESTION], tenant="bob", rid="his")
            one = seen_by(world, run(world, guess, tenant="bob"), viewer)
            told.add((number, one.cause, one.rid, one.words, one.missed_tokens, one.same_tokens))
        answers.append(told)
    assert answers[0] == answers[1]


def test_without_keys_nobody_is_shown_a_prompt() -> None:
    world = world_of()
    run(world, [*HEAD, 1, *TAIL])
    id = run(world, [*HEAD, 2, *TAIL])
    one = seen_by(world, id, "")
    assert (one.cause, one.rid, one.theirs) == (Cause.NEW_TEXT, "", [])


def test_another_engine_prefers_a_request_of_who_asks_to_a_longer_one_of_others() -> None:
    world = world_of()
    run(world, [*HEAD, 901, 902], tenant="ann", rid="hers")
    run(world, [*HEAD, 7], tenant="bob", rid="his")
    for token in (901, 801):
        near = find_holder(world.scheduler, "", packed([*HEAD, token, 8]), world.time, "bob")
        assert near == PrefixHolder(same_tokens=40, usable_tokens=40, rid="his")


def test_a_client_is_not_told_that_others_have_a_prompt_in_another_namespace() -> None:
    world = world_of()
    run(world, [*HEAD, *TAIL], tenant="ann", salt="hers")
    id = run(world, [*HEAD, *TAIL], tenant="bob", salt="his")
    assert seen_by(world, id, "bob").cause == Cause.FIRST_SEEN
    assert seen_by(world, id, "").cause == Cause.FIRST_SEEN
    assert seen_by(world, id, None).cause == Cause.OTHER_NAMESPACE
    own = run(world, [*HEAD, *TAIL], tenant="bob", salt="other")
    assert seen_by(world, own, "bob").rid == f"r{id}"


def test_an_engine_tells_which_request_has_the_beginning_of_a_prompt() -> None:
    world = world_of()
    run(world, [*HEAD, *TAIL], tenant="ann", rid="there")
    prompt = packed([*HEAD, *TAIL[:21], 7, 7])

    def holder(before_s: float, viewer: str | None = None) -> PrefixHolder | None:
        return find_holder(world.scheduler, "", prompt, before_s, viewer)

    assert holder(world.time) == PrefixHolder(same_tokens=61, usable_tokens=60, rid="there")
    assert holder(world.time, "bob") == PrefixHolder(same_tokens=60, usable_tokens=60, rid="")
    assert holder(0.0) is None
    assert find_holder(world.scheduler, "salt", prompt, world.time, None) is None


def packed(ids: Sequence[int]) -> bytes:
    return b"".join(id.to_bytes(4, "little") for id in ids)
