from __future__ import annotations

import asyncio
import io
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from tests.client.client_world import READY, World, run, texts
from tests.client.completions import make_request
from tests.text.tokens import EOS, byte_tokenizer
from weft.client.aux_outputs import prompt_logprobs
from weft.client.client import EngineClient
from weft.client.engine_state import EngineUnavailable
from weft.client.front_delay import REFRESH
from weft.client.generation import Delta
from weft.client.requests import pack_ids, unpack_ids
from weft.messages.codec import ToEngine
from weft.messages.control import (
    FlushCache,
    FlushCacheReply,
    FreezeGC,
    FreezeGCReply,
    GetState,
    GetStateReply,
)
from weft.messages.replies import (
    WAIT_HEADER,
    Finish,
    PromptLogprobsPiece,
    RequestWarning,
    StepOutput,
    TokenLogprobs,
)
from weft.messages.requests import Abort, BatchGenerate
from weft.messages.sampling import InvalidParam, SamplingParams
from weft.messages.status import EngineFailed, Stats
from weft.observe.metrics import Metrics
from weft.text.tokenizer import ContextExceeded


def test_tokens_become_deltas_and_an_end() -> None:
    world = World()
    generation = world.submit()
    [request] = world.requests
    world.say(request.id, "a\xc3".encode("latin-1"))
    [delta] = generation.take()
    assert (delta.text, delta.token_ids, delta.num_tokens) == ("a", [ord("a"), 0xC3], 2)
    assert generation.take() == []
    world.step((request.id, 0xA9))
    [delta] = generation.take()
    assert (delta.text, delta.token_ids, delta.num_tokens) == ("é", [0xA9], 3)
    stop = Finish(id=request.id, reason="stop", matched=EOS, cached_tokens=1, queue_s=0.5)
    world.step((request.id, EOS), finished=[stop])
    [delta] = generation.take()
    assert delta.token_ids == [EOS]
    assert delta.end is not None
    assert delta.end.reason == "stop"
    assert delta.end.matched == EOS
    assert (delta.end.prompt_tokens, delta.end.completion_tokens, delta.end.cached_tokens) == (
        2,
        4,
        1,
    )
    assert generation.ended
    assert world.client.num_open == 0


def test_slow_consumer_gets_one_delta_of_everything() -> None:
    async def main() -> None:
        world = World()
        generation = world.submit()
        id = world.requests[0].id
        world.say(id, "abc")
        world.say(id, "def")
        world.step(finished=[Finish(id=id, reason="length")])
        batches = [batch async for batch in generation]
        assert [texts(batch) for batch in batches] == [["abcdef"]]
        assert batches[0][0].token_ids == list(b"abcdef")

    run(main())


def test_consumer_is_woken_by_each_step() -> None:
    async def main() -> None:
        world = World()
        generation = world.submit()
        id = world.requests[0].id
        found = []

        async def consume() -> None:
            async for batch in generation:
                found.extend(texts(batch))

        task = asyncio.create_task(consume())
        for char in "abc":
            await asyncio.sleep(0)
            world.say(id, char)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        world.step(finished=[Finish(id=id, reason="length")])
        await task
        assert found == ["a", "b", "c", ""]

    run(main())


def test_without_stream_everything_comes_once_all_have_ended() -> None:
    async def main() -> None:
        world = World()
        generation = world.submit(stream=False, n=2)
        first, second = world.requests
        world.say(first.id, "one")
        world.step(finished=[Finish(id=first.id, reason="length")])
        assert generation.take() == []
        world.say(second.id, "two")
        world.step(finished=[Finish(id=second.id, reason="length")])
        batches = [batch async for batch in generation]
        assert [texts(batch) for batch in batches] == [["one", "two"]]

    run(main())


def test_n_is_n_requests_with_seeds_of_their_own() -> None:
    world = World()
    world.submit(n=3, seed=7)
    world.submit(n=2, seed=2**63 - 1)
    world.submit()
    assert [request.sampling.n for request in world.requests] == [1] * 6
    assert [request.sampling.seed for request in world.requests] == [
        7,
        8,
        9,
        2**63 - 1,
        -(2**63),
        None,
    ]
    assert len({request.id for request in world.requests}) == 6


def test_length_defaults_to_the_rest_of_the_context() -> None:
    world = World()
    world.submit("x" * 30)
    world.submit("x" * 30, max_new_tokens=70)
    assert [request.sampling.max_new_tokens for request in world.requests] == [70, 70]


@pytest.mark.parametrize(
    ("ids", "params", "match"),
    [
        ([], {}, "empty"),
        ([1, 300], {}, "300; 0 to 299"),
        ([1, -1], {}, "-1; 0 to 299"),
        ([2**40], {}, "0 to 299"),
        ([1] * 100, {}, "100 tokens; the context of 100"),
        ([1] * 91, {}, "91 tokens; at most 90"),
        ([1] * 60, {"max_new_tokens": 50}, "60 tokens and max_tokens is 50"),
        ([1] * 60, {"min_new_tokens": 50}, "min_tokens is 50, above max_tokens"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"stop_token_ids": (2**31,)}, "stop_token_ids is 2147483648"),
    ],
)
def test_invalid_prompt_is_refused_before_anything_is_sent(
    ids: list[int], params: dict[str, Any], match: str
) -> None:
    world = World()
    good = make_request([1], SamplingParams(), rid="good")
    with pytest.raises(InvalidParam, match=match):
        world.client.submit([good, make_request(ids, SamplingParams(**params), rid="bad")])
    assert world.sent == []
    assert world.client.num_open == 0


def test_context_errors_are_of_their_own_kind() -> None:
    with pytest.raises(ContextExceeded):
        World().submit("x" * 100)


def test_a_prompt_that_nothing_is_to_follow_needs_no_room_for_a_token() -> None:
    world = World()
    world.submit("x" * 91, max_new_tokens=0)
    assert [len(request.input_ids) // 4 for request in world.requests] == [91]
    for text, max_new in (("x" * 91, 1), ("x" * 92, 0)):
        with pytest.raises(ContextExceeded):
            world.submit(text, max_new_tokens=max_new)


def test_what_is_given_of_the_prompt_is_there_before_the_end() -> None:
    world = World()
    generation = world.submit("hi", max_new_tokens=0, prompt_logprobs=0)
    [request] = world.requests
    assert request.recompute_from == 0
    values = np.array([np.nan, -1.5], dtype=np.float32).tobytes()
    piece = PromptLogprobsPiece(
        id=request.id,
        tokens=request.input_ids,
        logprobs=values,
        ranks=b"\0" * 8,
        num_top=0,
        top_ids=b"",
        top_logprobs=b"",
        num_ids=0,
        id_logprobs=b"",
    )
    world.step(aux=[piece], finished=[Finish(id=request.id, reason="length", prompt_tokens=2)])
    [delta] = generation.take()
    assert delta.end is not None
    assert (delta.text, delta.token_ids, delta.end.reason, delta.end.completion_tokens) == (
        "",
        [],
        "length",
        0,
    )
    told = prompt_logprobs(generation.completions[0].aux_outputs)
    assert [(one.token, one.logprob) for one in told] == [(ord("h"), None), (ord("i"), -1.5)]


def test_stop_string_over_token_borders_ends_here_and_aborts_there() -> None:
    world = World()
    generation = world.submit(stop=("öND",))
    id = world.requests[0].id
    world.say(id, "text ö")
    assert texts(generation.take()) == ["text "]
    world.say(id, "ND and more")
    assert world.aborts == [
        Abort(ids=(id,), output_lens=(9,), message="a stop string was found")
    ]  # ö is two
    assert generation.take() == []  # the engine's numbers are awaited
    world.say(id, "late")
    world.step(finished=[Finish(id=id, reason="abort", cached_tokens=1)])
    [delta] = generation.take()
    assert delta.text == ""
    assert delta.end is not None
    assert (delta.end.reason, delta.end.matched, delta.end.cached_tokens) == ("stop", "öND", 1)
    assert delta.end.completion_tokens == len("text öND".encode())
    assert world.client.deliveries.num_late_tokens == len(" and morelate")


def test_stop_string_in_the_last_step_needs_no_abort() -> None:
    world = World()
    generation = world.submit(stop=("b",), include_stop=True)
    id = world.requests[0].id
    world.step((id, ord("a")), (id, ord("b")), finished=[Finish(id=id, reason="length")])
    [delta] = generation.take()
    assert delta.text == "ab"
    assert delta.end is not None
    assert (delta.end.reason, delta.end.matched) == ("stop", "b")
    assert world.aborts == []


def test_held_back_beginning_of_a_stop_string_is_shown_at_the_end() -> None:
    world = World()
    generation = world.submit(stop=("END",))
    id = world.requests[0].id
    world.say(id, "the EN")
    world.step(finished=[Finish(id=id, reason="length")])
    assert texts(generation.take()) == ["the EN"]


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    world = World()
    generation = world.submit(stop=("a",), min_new_tokens=2)
    id = world.requests[0].id
    world.say(id, "aaa")
    assert texts(generation.take()) == ["aa"]
    assert len(world.aborts) == 1


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_text_of_a_stop_token_is_shown_only_if_asked_for(include: bool, text: str) -> None:
    world = World()
    generation = world.submit(stop_token_ids=(ord("b"),), include_stop=include)
    id = world.requests[0].id
    finish = Finish(id=id, reason="stop", matched=ord("b"))
    world.step((id, ord("a")), (id, ord("b")), finished=[finish])
    [delta] = generation.take()
    assert (delta.text, delta.token_ids) == (text, [ord("a"), ord("b")])


def test_logprobs_stand_beside_their_tokens() -> None:
    world = World()
    generation = world.submit(logprobs=1)
    id = world.requests[0].id
    found = [
        TokenLogprobs(id=id, logprob=-float(k), top_ids=[k], top_logprobs=[0.0]) for k in range(2)
    ]
    world.step((id, ord("a")), (id, 0xC3), logprobs=found)
    [delta] = generation.take()
    assert (delta.token_ids, delta.logprobs) == ([ord("a"), 0xC3], found)


def test_logprobs_behind_a_stop_string_are_dropped_with_their_tokens() -> None:
    world = World()
    generation = world.submit(logprobs=0, stop=("b",))
    id = world.requests[0].id
    found = [TokenLogprobs(id=id, logprob=-float(k), top_ids=[], top_logprobs=[]) for k in range(3)]
    world.step((id, ord("a")), (id, ord("b")), (id, ord("c")), logprobs=found)
    world.step((id, ord("d")), logprobs=found[:1])
    world.step(finished=[Finish(id=id, reason="abort")])
    [delta] = generation.take()
    assert delta.token_ids == [ord("a"), ord("b")]
    assert delta.logprobs == found[:2]


def test_abort_by_name_is_exact() -> None:
    world = World()
    world.submit(rid="req-1")
    world.submit(rid="req-10")
    world.submit(rid="req-1")
    first, _, third = (request.id for request in world.requests)
    assert world.client.deliveries.abort("req-1") == 2
    assert world.client.deliveries.abort("req") == 0
    [abort] = world.aborts
    assert set(abort.ids) == {first, third}


def test_abort_by_the_name_of_a_batch_ends_all_its_members() -> None:
    world = World()
    prompts = [
        make_request([1], SamplingParams(n=2), rid=f"batch-{i}", group="batch") for i in range(2)
    ]
    world.client.submit(prompts)
    world.submit(rid="batch-10")
    members = {request.id for request in world.requests[:4]}
    assert world.client.deliveries.abort("batch-1") == 2
    assert world.client.deliveries.abort("batch") == 4
    assert set(world.aborts[-1].ids) == members
    world.step(finished=[Finish(id=id, reason="abort") for id in members])
    assert world.client.deliveries.abort("batch") == 0


def test_aborted_request_ends_by_the_engines_word() -> None:
    world = World()
    generation = world.submit()
    id = world.requests[0].id
    world.client.deliveries.abort_all()
    assert world.aborts == [Abort(all=True)]
    world.step(finished=[Finish(id=id, reason="abort", message="aborted by the client")])
    [delta] = generation.take()
    assert delta.end is not None
    assert delta.end.reason == "abort"
    assert not delta.end.failed
    assert world.client.deliveries.abort("r") == 0


def test_closing_aborts_only_what_is_open() -> None:
    world = World()
    with world.submit(n=2) as generation:
        first, second = (request.id for request in world.requests)
        world.step(finished=[Finish(id=first, reason="length")])
    assert world.aborts == [Abort(ids=(second,), message="the client has disconnected")]
    generation.close()
    assert len(world.aborts) == 1
    world.say(second, "late")
    world.step(finished=[Finish(id=second, reason="abort")])
    assert generation.take() == []
    assert world.client.num_open == 0


def test_cancelled_consumer_aborts_at_once() -> None:
    async def main() -> None:
        world = World()

        async def consume() -> None:
            with world.submit() as generation:
                async for _ in generation:
                    pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [abort.ids for abort in world.aborts] == [(world.requests[0].id,)]

    run(main())


def test_close_from_elsewhere_ends_the_iteration() -> None:
    async def main() -> None:
        world = World()
        generation = world.submit()

        async def consume() -> list[list[Delta]]:
            return [batch async for batch in generation]

        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        generation.close()
        assert await task == []

    run(main())


def test_reader_that_stops_reading_is_given_up() -> None:
    world = World(max_pending_tokens=10)
    slow, fast = world.submit(), world.submit()
    slow_id, fast_id = (request.id for request in world.requests)
    for _ in range(30):
        world.step((slow_id, ord("a")), (fast_id, ord("a")))
        fast.take()
    assert [abort.ids for abort in world.aborts] == [(slow_id,)]
    [delta] = slow.take()
    assert len(delta.text) == 11
    assert delta.end is not None
    assert (delta.end.reason, delta.end.message) == (
        "abort",
        "the client does not read its answer",
    )
    assert not fast.ended


def test_reader_without_stream_may_wait() -> None:
    world = World(max_pending_tokens=10)
    world.submit(stream=False)
    world.say(world.requests[0].id, "a" * 30)
    assert world.aborts == []


def test_failed_engine_ends_everything_with_an_error() -> None:
    async def main() -> None:
        world = World()
        streams = [world.submit(), world.submit(stream=False)]
        call = asyncio.create_task(world.client.call(FlushCache()))
        await asyncio.sleep(0)
        world.client.deliver(EngineFailed(message="out of luck"))
        for stream in streams:
            [[delta]] = [batch async for batch in stream]
            assert delta.end is not None
            assert (delta.end.reason, delta.end.status) == ("error", 503)
            assert "out of luck" in delta.end.message
        with pytest.raises(EngineUnavailable, match="out of luck"):
            await call
        with pytest.raises(EngineUnavailable, match="out of luck"):
            world.submit()
        with pytest.raises(EngineUnavailable):
            await world.client.state.wait_ready()
        assert not world.client.state.is_alive
        assert world.aborts == []

    run(main())


def test_end_all_ends_here_and_aborts_there() -> None:
    world = World()
    generation = world.submit()
    world.client.deliveries.end_all("the server is shutting down")
    [delta] = generation.take()
    assert delta.end is not None
    assert delta.end.failed
    assert world.aborts == [
        Abort(ids=(world.requests[0].id,), message="the server is shutting down")
    ]


def test_a_wait_is_reported_with_the_fronts_part_and_other_warnings_as_they_are() -> None:
    async def main() -> None:
        world = World()
        for _ in range(REFRESH):
            world.client.recorder.delay.learn(0.002)
        (completion,) = world.submit().completions
        id = completion.spec.request.id
        warnings = [
            RequestWarning(id=id, text="5-9", header=WAIT_HEADER),
            RequestWarning(id=id, text="5-9"),
        ]
        world.client.deliver(StepOutput(warnings=warnings))
        assert completion.warnings == [(WAIT_HEADER, "7-11"), ("warnings", "5-9")]

    asyncio.run(main())


def test_nothing_is_sent_before_the_engine_is_ready() -> None:
    async def main() -> None:
        sent: list[ToEngine] = []
        client = EngineClient(byte_tokenizer(), sent.append)
        waiter = asyncio.create_task(client.state.wait_ready())
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="not ready"):
            client.submit([make_request([1], SamplingParams(), rid="r")])
        assert not client.state.is_alive
        client.deliver(READY)
        assert await waiter == READY
        assert client.state.is_alive
        assert sent == []

    run(main())


@pytest.mark.parametrize(("kv_tokens", "page_size"), [(900, 1), (900, 16), (64, 64)])
def test_the_memory_of_the_engine_is_reported_in_whole_pages(
    kv_tokens: int, page_size: int
) -> None:
    metrics = Metrics("m")
    client = EngineClient(byte_tokenizer(), lambda message: None, metrics=metrics)
    client.deliver(msgspec.structs.replace(READY, kv_tokens=kv_tokens, page_size=page_size))
    labels = [
        sample.labels
        for family in metrics.registry.collect()
        for sample in family.samples
        if "num_gpu_blocks" in sample.labels
    ]
    num_pages = str(kv_tokens // page_size)
    assert labels == [{"block_size": str(page_size), "num_gpu_blocks": num_pages}]


def test_calls_get_their_own_replies() -> None:
    async def main() -> None:
        world = World()
        flush = asyncio.create_task(world.client.call(FlushCache(timeout_s=1.5)))
        state = asyncio.create_task(world.client.get_state())
        freeze = asyncio.create_task(world.client.call(FreezeGC()))
        await asyncio.sleep(0)
        first, second, third = world.sent
        assert isinstance(first, FlushCache)
        assert first.timeout_s == 1.5
        assert isinstance(second, GetState)
        assert isinstance(third, FreezeGC)
        stats = Stats(num_running=3, kv_tokens=100, kv_used=25)
        world.client.deliver(FreezeGCReply(call=third.call, frozen_objects=9))
        world.client.deliver(GetStateReply(call=second.call, stats=stats))
        world.client.deliver(FlushCacheReply(call=first.call, success=True))
        world.client.deliver(
            FlushCacheReply(call=first.call, success=True)
        )  # a second reply finds nobody
        assert (await flush).success
        assert await state == stats == world.client.state.stats
        assert (await freeze).frozen_objects == 9
        assert world.client.metrics.engine.token_usage == 0.25

    run(main())


def test_a_closed_client_sends_nothing_and_ends_its_calls() -> None:
    async def main() -> None:
        world = World()
        early = asyncio.create_task(world.client.call(FlushCache()))
        await asyncio.sleep(0)
        num_sent = len(world.sent)
        world.client.close("it is unloaded")
        for call in (early, world.client.call(FlushCache())):
            with pytest.raises(EngineUnavailable, match="it is unloaded"):
                await call
        assert len(world.sent) == num_sent

    run(main())


def test_call_without_reply_times_out() -> None:
    async def main() -> None:
        world = World()
        with pytest.raises(EngineUnavailable, match="not answered"):
            await world.client.get_state(0.01)
        world.client.deliver(GetStateReply(call=1, stats=Stats()))

    run(main())


def test_run_delivers_and_survives_a_bad_message() -> None:
    async def main() -> None:
        world = World()
        generation = world.submit()
        id = world.requests[0].id
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.create_task(world.client.run(inbox.get))
        inbox.put_nowait(StepOutput(ids=b"odd"))
        inbox.put_nowait(StepOutput(finished=[Finish(id=id, reason="length")]))
        [[delta]] = [batch async for batch in generation]
        assert delta.end is not None
        task.cancel()

    run(main())


def test_flood_of_messages_lets_consumers_run() -> None:
    async def main() -> None:
        world = World()
        generation = world.submit()
        id = world.requests[0].id
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        packed = np.asarray([id]).astype(np.int64).tobytes()
        for _ in range(50):
            inbox.put_nowait(
                StepOutput(ids=packed, tokens=np.asarray([97], dtype=np.int32).tobytes())
            )
        inbox.put_nowait(StepOutput(finished=[Finish(id=id, reason="length")]))
        task = asyncio.create_task(world.client.run(inbox.get))
        batches = [batch async for batch in generation]
        assert len(batches) > 10
        task.cancel()

    run(main())


def test_late_output_for_a_request_that_ended_is_counted_and_ignored() -> None:
    world = World()
    world.step((99, 1), finished=[Finish(id=99, reason="stop")])
    assert world.client.deliveries.num_late_tokens == 1
    assert abandoned(world, "late") == 1


def test_tokens_of_clients_that_have_left_are_counted_as_far_as_they_had_not_got_them() -> None:
    world = World()
    stream = world.submit()
    whole = world.submit(stream=False)
    world.say(world.requests[0].id, "taken")
    stream.take()
    for request in world.requests:
        world.say(request.id, "not")
    stream.close()
    whole.close()
    assert abandoned(world, "disconnect") == 3 + 3
    assert abandoned(world, "late") == 0


def abandoned(world: World, reason: str) -> float:
    """Tokens that no client got."""
    metrics = world.client.metrics
    value = metrics.registry.get_sample_value("weft:abandoned_tokens_total", {"reason": reason})
    assert value is not None
    return value


def test_a_second_end_and_masses_of_late_tokens_change_nothing_and_fill_no_log(
    lines: io.StringIO,
) -> None:
    world = World()
    generation = world.submit()
    id = world.requests[0].id
    world.step((id, 97), finished=[Finish(id=id, reason="length")])
    [first] = generation.take()
    for _ in range(1_000):
        world.step((id, 98), finished=[Finish(id=id, reason="stop")])
    assert first.end is not None
    assert first.end.reason == "length"
    assert generation.take() == []
    assert (world.client.num_open, world.client.deliveries.num_late_tokens) == (0, 1_000)
    assert lines.getvalue().count("\n") <= 1


def test_engine_that_answers_inside_send_is_served() -> None:
    def send(message: ToEngine) -> None:
        assert isinstance(message, BatchGenerate)
        client.deliver(
            StepOutput(
                finished=[Finish(id=member.id, reason="length") for member in message.members()]
            )
        )

    client = EngineClient(byte_tokenizer(), send)
    client.deliver(READY)
    generation = client.submit([make_request([1], SamplingParams(n=2), rid="r")], stream=False)
    assert len(generation.take()) == 2


@pytest.mark.parametrize("ids", [[], [0], [299, 0, 7]])
def test_packed_ids_are_read_again(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids, 300)).tolist() == ids


def test_a_request_can_be_submitted_twice() -> None:
    world = World()
    request = make_request([1, 2], SamplingParams(n=2, seed=7))
    world.client.submit([request])
    world.client.submit([request])
    sent = [one for message in world.sent for one in message.members()]  # type: ignore[union-attr]
    assert [one.id for one in sent] == [1, 2, 3, 4]
    assert [one.sampling.seed for one in sent] == [7, 8, 7, 8]
    assert request.id == 0


def test_a_completion_keeps_its_request_without_the_prompt() -> None:
    world = World()
    vectors = bytes(4 * 2 * 8)
    request = replace(make_request([0, 0], SamplingParams()), vectors=vectors)
    [completion] = world.client.submit([request]).completions
    spec = completion.spec
    assert (spec.prompt_len, spec.num_embed_bytes) == (2, len(vectors))
    assert spec.request == replace(request, id=1, input_ids=b"", vectors=b"")
