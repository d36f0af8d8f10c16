"""Pictures in prompts: what is encoded and when, who waits for it, what is found again, and what is
refused."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.scheduler.media_oracle import content_of
from tests.scheduler.media_scenes import run, seeing, settings
from tests.scheduler.random_worlds import picture
from tests.scheduler.recorded import RecordedWorld
from weft.config.media import MediaRules
from weft.engine.explain import explain
from weft.journal.replay import Replay
from weft.memory.media.borders import border_after, border_before
from weft.memory.media.ids import content_ids
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.cache import RadixCache
from weft.messages.control import FlushCache
from weft.messages.media import MediaItem
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.messages.sessions import SessionParams
from weft.messages.weights import UpdateWeightsFromDisk
from weft.plan.inputs import EncoderInput, MediaValues
from weft.scheduler.features.media import MediaFeature
from weft.scheduler.media.encoder_cache import EncoderCache
from weft.scheduler.media.prompt import three_positions
from weft.scheduler.speculation.sources import Known, PrefixTree

VALUES = np.arange(4_000, dtype=np.float32).tobytes()


def num_runs(world: RecordedWorld) -> int:
    assert world.runner.media is not None
    runs = sum(world.runner.media.num_runs.values())
    assert world.engine._engine.services.stats().total_encoder_runs == runs
    return runs


def whys(world: RecordedWorld, id: int) -> list[str]:
    """All that is told of a request."""
    told = explain(world.scheduler, id, world.time)
    assert told is not None
    return [entry.what for entry in told.timeline]


def test_a_picture_is_encoded_once_and_found_where_it_stood() -> None:
    world = RecordedWorld(settings())
    assert run(world, 5, 6, 1_001, 7) == 0
    assert num_runs(world) == 1
    assert run(world, 5, 6, 1_001, 7) == 2 + 16
    assert run(world, 5, 6, 1_002, 7) == 2  # another one: up to its first token
    assert num_runs(world) == 2
    assert run(world, 9, 1_001, 7) == 0  # behind another text: encoded already, and K and V are not
    assert run(world, 5, 6, 1_001, 7, salt="other") == 0
    assert num_runs(world) == 2
    assert world.engine._engine.services.stats().total_encoder_hits == 2
    assert world.engine._engine.services.stats().total_encoder_misses == 2
    assert whys(world, 0)[2] == "image encoder: 1 encoded (16 tokens), 0 found encoded"
    assert whys(world, 3)[2] == "image encoder: 0 encoded (0 tokens), 1 found encoded"
    world.check_outputs()
    world.replay(check=True)


def test_several_completions_of_one_prompt_share_its_picture() -> None:
    world = RecordedWorld(settings())
    for _ in range(4):
        world.send(**seeing(5, 1_001, *range(20, 40)), max_new_tokens=5)
    for _ in range(2):
        world.send(**seeing(6, 1_003), max_new_tokens=5)  # too short to wait for one another
    world.run_dry()
    world.check_outputs()
    assert num_runs(world) == 2
    assert [world.finished[id].cached_tokens for id in range(6)] == [0, 36, 36, 36, 0, 0]


def test_waiting_for_the_encoder_is_a_reason_and_delays_no_text() -> None:
    world = RecordedWorld(settings(max_encoder_tokens=20))
    first = world.send(**seeing(5, 1_001, 7), max_new_tokens=2)  # 16 tokens
    second = world.send(**seeing(1_005, 7), max_new_tokens=2)  # 12 tokens do not fit
    text = world.send([8, 9], max_new_tokens=2)
    world.step()
    assert world.request(second).row < 0 <= world.request(text).row
    assert whys(world, second)[-1] == "held: waits for the image encoder"
    listed = explain(world.scheduler, second, world.time)
    assert listed is not None
    assert listed.why == "waits for the image encoder"
    world.run_dry()
    world.check_outputs()
    assert set(world.finished) == {first, second, text}


@pytest.mark.parametrize("chunk", [-1, 8, 64])
def test_a_picture_that_is_larger_than_all_bounds_is_encoded_alone(chunk: int) -> None:
    world = RecordedWorld(
        settings(chunked_prefill_size=chunk, max_encoder_tokens=1, encoder_cache_tokens=1)
    )
    for parts in ((5, 1_004, 1_001, 1_004, 7), (1_010, 1_000, 1_000), (1_001, 1_005)):
        world.send(**seeing(*parts), max_new_tokens=2)
    world.run_dry()
    world.check_outputs()
    world.replay(check=True)


def test_a_piece_ends_before_a_picture_that_does_not_fit() -> None:
    world = RecordedWorld(settings(max_encoder_tokens=20))
    id = world.send(**seeing(5, 1_001, 6, 6, 1_005, 7), max_new_tokens=2)
    world.step()
    assert world.request(id).kv_len == 1 + 16 + 2
    world.run_dry()
    world.check_outputs()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("chunk", [8, 64])
def test_what_cannot_be_encoded_ends_its_requests_alone(depth: int, chunk: int) -> None:
    world = RecordedWorld(settings(chunked_prefill_size=chunk), depth=depth)
    oracle = world.runner.media
    assert oracle is not None
    broken = picture(1, 0).digest
    oracle.broken.add(broken)
    good = world.send(**seeing(5, 1_002, 7), max_new_tokens=9)
    bad = [world.send(**seeing(5, 1_001, 7, i), max_new_tokens=9) for i in range(3)]
    text = world.send([8, 9], max_new_tokens=9)
    world.run_dry()
    for id in bad:
        assert world.finished[id].reason == "error"
        assert world.finished[id].message == "the image encoder failed (Broken)"
        assert world.finished[id].status == 500
    assert {world.finished[id].reason for id in (good, text)} == {"length"}
    # Nothing of it is kept: it may be better the next time.
    oracle.broken.clear()
    again = world.send(**seeing(5, 1_001, 7, 0), max_new_tokens=9)
    world.run_dry()
    world.check_idle()
    assert world.finished[again].reason == "length"
    assert world.finished[again].cached_tokens <= 1
    for id in bad:
        world.outputs[id] = []  # the oracle gives tokens where a device has not a number
    world.check_outputs()
    world.replay(check=True)


def test_new_weights_and_an_emptied_cache_take_what_was_encoded_along() -> None:
    world = RecordedWorld(settings())
    run(world, 5, 1_001, 7)
    world.tell(FlushCache(call=1))
    world.step()
    run(world, 5, 1_001, 7)
    assert num_runs(world) == 2
    id = world.send(**seeing(5, 1_001, 7, 8), max_new_tokens=40)
    for _ in range(4):
        world.step()
    world.tell(UpdateWeightsFromDisk(call=2, model_path="0"))
    world.run_dry()
    assert world.finished[id].reason == "length"
    assert num_runs(world) == 3
    world.check_outputs()


def test_an_aborted_request_leaves_nothing_of_its_pictures() -> None:
    world = RecordedWorld(settings(chunked_prefill_size=8))
    media = world.engine._engine.services.features.media
    for num_steps in range(7):
        id = world.send(**seeing(5, 1_001 + num_steps % 2, 7, 1_003, 8), max_new_tokens=9)
        for _ in range(num_steps):
            world.step()
        world.abort(Abort(ids=(id,)))
        world.run_dry()
        assert not media.by_id
        assert not media._rows
        assert not media._taken
    world.check_idle()
    # A request without pictures visits nothing of all that.
    assert not world.scheduler.hooks.piece_budgets
    assert not world.scheduler.hooks._prepare


@pytest.mark.parametrize("puts_aside", [False, True])
def test_a_journal_has_digests_and_no_values(puts_aside: bool) -> None:
    world = RecordedWorld(settings(chunked_prefill_size=8), depth=1)
    if puts_aside:
        world.put_aside_in_every_step()
    sent = seeing(5, 1_001, 7)
    item = msgspec.structs.replace(sent["media"][0], shape=(4_000,), values=VALUES)
    oracle = world.runner.media
    assert oracle is not None
    oracle.learn((item,))
    message = GenerateRequest(
        id=0,
        rid="r",
        input_ids=np.array(sent["prompt"], dtype=np.int32).tobytes(),
        media=(item,),
        sampling=SamplingParams(max_new_tokens=4, ignore_eos=True),
    )
    assert_values = oracle.follow
    oracle.follow = lambda plan, **more: assert_values(  # type: ignore[method-assign]
        without_shapes(plan), **more
    )
    world.engine.submit(message)
    while world.engine.has_work:
        world.engine.step()
    records = b"".join(record for file in world.records.files for record in file)
    assert VALUES[400:440] not in records
    assert item.digest in records
    assert len(records) < 200_000
    for file in world.records.files:
        replay = Replay(file, check=True)
        assert replay.run(), replay.difference


def without_shapes(plan: Any) -> Any:
    """The plan, whose values the oracle takes for those of its own pictures."""
    for op in plan.inputs:
        for one in op.encode:
            assert one.values.array.shape == (4_000,)
            object.__setattr__(one, "values", MediaValues(np.zeros(1, dtype=np.float32)))
    return plan


# What is refused


def refusal(rules: MediaRules | None = None, **changes: Any) -> str:
    feature = MediaFeature(settings(media=rules))
    sent = seeing(5, 1_001, 7)
    values: dict[str, Any] = {
        "id": 0,
        "rid": "r",
        "input_ids": np.array(sent["prompt"], dtype=np.int32).tobytes(),
        "media": sent["media"],
        "sampling": SamplingParams(),
    }
    refused = feature.refusal(GenerateRequest(**{**values, **changes}))
    if refused is None:
        return ""
    assert refused.status == 400
    return refused.message


def test_a_model_without_an_encoder_takes_no_pictures() -> None:
    assert refusal() == "this model takes no image input; it reads only text"
    assert refusal(MediaRules()) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"digest": b"short"}, "media item 0 (image) has a digest of 5 bytes; 32 are needed"),
        ({"start": -1}, "has tokens -1 to 15; 0 to 18 are left for it"),
        ({"start": 4}, "has tokens 4 to 20; 0 to 18 are left for it"),
        ({"length": 0, "grid": None}, "has tokens 1 to 1; 0 to 18 are left for it"),
        ({"grid": (1, 3, 4)}, "has a grid of (1, 3, 4), which is not 16 tokens"),
        ({"grid": (-1, -4, 4)}, "has a grid of (-1, -4, 4), which is not 16 tokens"),
        ({"grid": (4, 2, 2), "time_step": 1e9}, "1e+09 positions between two"),
        ({"grid": (4, 2, 2), "time_step": float("nan")}, "nan positions between two"),
    ],
)
def test_items_that_do_not_fit_the_prompt_are_refused(changes: dict[str, Any], why: str) -> None:
    item = msgspec.structs.replace(seeing(5, 1_001, 7)["media"][0], **changes)
    assert why in refusal(MediaRules(), media=(item,))


def test_items_that_overlap_are_refused() -> None:
    one = seeing(5, 1_001, 7)["media"][0]
    assert "17 to 18 are left for it" in refusal(MediaRules(), media=(one, one))


def test_pictures_are_refused_where_they_cannot_be_right() -> None:
    session = SessionParams(id="s")
    assert "a request of a session" in refusal(MediaRules(), session=session)
    assert "input embeddings" in refusal(MediaRules(), vectors=bytes(4))


# The parts


def test_positions_lie_in_time_height_and_width() -> None:
    grid = MediaItem(
        kind="video", digest=bytes(32), start=2, length=12, grid=(2, 2, 3), time_step=1.5
    )
    line = MediaItem(kind="audio", digest=bytes(32), start=15, length=2)
    found = three_positions((grid, line), 18)
    assert found.prompt[:, :2].tolist() == [[0, 1]] * 3
    assert found.prompt[0, 2:14].tolist() == [2] * 6 + [3] * 6
    assert found.prompt[1, 2:14].tolist() == [2, 2, 2, 3, 3, 3] * 2
    assert found.prompt[2, 2:14].tolist() == [2, 3, 4] * 4
    assert found.prompt[:, 14:].tolist() == [[5, 6, 7, 8]] * 3
    assert found.shift == 9 - 18


def test_ids_of_content_are_below_zero_and_its_own() -> None:
    ids = np.frombuffer(content_ids(b"content", 20), dtype=np.int32)
    assert len(ids) == 20
    assert ids.max() < 0
    expected = int.from_bytes(hashlib.sha256(b"content" + bytes(8)).digest()[:4], "little")
    assert int(ids[0]) == (expected | 1 << 31) - (1 << 32)
    assert ids.tolist()[:9] == np.frombuffer(content_ids(b"content", 9), dtype=np.int32).tolist()
    assert content_ids(b"other", 20) != ids.tobytes()
    one = picture(1, 3)
    other_grid = msgspec.structs.replace(one, grid=(1, 2, 8))
    assert content_of(one) != content_of(other_grid)


def test_borders_are_inside_nothing_that_is_whole() -> None:
    spans = [(3, 7), (8, 13)]
    assert [border_before(end, spans, 4) for end in range(17)] == [0] * 8 + [8] * 8 + [16]
    assert [border_after(begin, spans, 4) for begin in range(9)] == [8] * 8 + [16]
    assert border_before(5, [], 4) == 4


def test_what_was_used_longest_ago_goes_first() -> None:
    books = EncoderCache(10)

    def wanted(*names: str) -> list[EncoderInput]:
        values = MediaValues(np.zeros(0, dtype=np.float32))
        return [EncoderInput(name.encode(), "image", 4, None, values) for name in names]

    assert books.take(wanted("a", "b"), ()).drop == ()
    assert books.take(wanted("a"), ()).encode == ()
    assert books.take(wanted("c"), ()).drop == (b"b",)
    work = books.take(wanted("d"), {b"a"})
    assert (work.drop, books.num_tokens) == ((b"c",), 8)
    assert books.take(wanted("a", "d", "e"), ()).drop == ()  # all of them are needed at once
    assert books.num_tokens == 12
    books.forget(b"e")
    work = books.take(wanted("e"), ())
    assert work.drop[0] == b"e"
    assert [one.digest for one in work.encode] == [b"e"]
    books.forget_all()
    work = books.take(wanted("a"), ())
    assert work.drops_all
    assert [one.digest for one in work.encode] == [b"a"]


def test_no_picture_is_guessed_to_follow() -> None:
    cache = RadixCache(1)
    text = np.array([5, 6, 7], dtype=np.int32).tobytes()
    key = CacheKey("", text + content_ids(b"content", 3))
    cache.insert(key, np.arange(6, dtype=np.int32))
    world = RecordedWorld(settings())
    id = world.send([5, 6], max_new_tokens=4)
    known = Known(world.request(id), text[:8])
    assert PrefixTree(cache).drafts(known, 4) == text[8:]
    assert PrefixTree(cache).drafts(known._replace(tokens=text), 4) == b""
