"""A message of the engine that cannot be read, decoded or delivered ends its own calls and
completions, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from tests.client.client_world import World, run, texts
from weft.client.calls import EngineFault
from weft.messages.calls import CallFailed
from weft.messages.codec import BadMessage, FromEngine, Unreadable, encode, read_from_engine
from weft.messages.control import GetState, GetStateReply
from weft.messages.replies import Finish, StepOutput
from weft.messages.status import Stats
from weft.text.detokenizer import ByteDetokenizer


def spoiled(message: FromEngine, **fields: object) -> bytes:
    """The message with other values in some fields, which no decoder takes."""
    content = msgspec.msgpack.decode(encode(message))
    return msgspec.msgpack.encode({**content, **fields})


async def deliver(world: World, *messages: bytes) -> None:
    """As the front does with what comes from the socket."""
    left = list(messages)
    done = asyncio.get_running_loop().create_future()

    async def receive() -> FromEngine | Unreadable:
        if not left:
            done.set_result(None)
            await asyncio.Event().wait()
        return read_from_engine(left.pop(0))

    task = asyncio.create_task(world.client.run(receive))
    await done
    task.cancel()


def step(*ids: int, text: bytes = b"a", finished: tuple[Finish, ...] = ()) -> StepOutput:
    tokens = np.array([text[0]] * len(ids), dtype=np.int32).tobytes()
    return StepOutput(
        ids=np.array(ids, dtype=np.int64).tobytes(), tokens=tokens, finished=list(finished)
    )


def ask(world: World) -> asyncio.Task[GetStateReply]:
    return asyncio.create_task(world.client.call(GetState()))


def test_a_reply_that_cannot_be_read_ends_its_call_at_once_and_no_other() -> None:
    async def main() -> None:
        world = World()
        lost = ask(world)
        told = ask(world)
        await asyncio.sleep(0)
        first, second = [message.call for message in world.sent if isinstance(message, GetState)]
        reply = GetStateReply(call=first, stats=Stats())
        await deliver(
            world,
            spoiled(reply, stats="?"),
            encode(GetStateReply(call=second, stats=Stats(num_running=3))),
        )
        with pytest.raises(EngineFault, match="could not be read"):
            await lost
        assert (await told).stats.num_running == 3

    run(main())


def test_a_call_on_which_the_engine_failed_ends_with_its_words() -> None:
    async def main() -> None:
        world = World()
        task = ask(world)
        await asyncio.sleep(0)
        [message] = [one for one in world.sent if isinstance(one, GetState)]
        world.client.deliver(
            CallFailed(call=message.call, message="the engine failed on GetState (OverflowError)")
        )
        with pytest.raises(EngineFault, match="OverflowError"):
            await task

    run(main())


@pytest.mark.parametrize("spoil", [{"tokens": "no bytes"}, {"finished": 5}, {"logprobs": {}}])
def test_a_step_that_cannot_be_read_ends_its_requests_and_no_others(
    spoil: dict[str, object],
) -> None:
    async def main() -> None:
        world = World()
        hit = world.submit(rid="hit")
        spared = world.submit(rid="spared")
        first, second = (request.id for request in world.requests)
        await deliver(world, spoiled(step(first), **spoil), encode(step(second)))
        [delta] = hit.take()
        assert delta.end is not None
        assert delta.end.reason == "error"
        assert delta.end.status == 500
        assert [abort.ids for abort in world.aborts] == [(first,)]
        assert texts(spared.take()) == ["a"]
        assert world.client.num_open == 1

    run(main())


def test_bytes_that_are_no_message_belong_to_no_request() -> None:
    for data in (
        b"",
        b"\xff" * 9,
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"type": "none"}),
    ):
        with pytest.raises(BadMessage):
            read_from_engine(data)


@pytest.mark.parametrize("moment", ["push", "flush"])
def test_an_output_that_cannot_be_decoded_ends_alone(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Callable[..., str] = getattr(ByteDetokenizer, moment)
    broken: list[ByteDetokenizer] = []

    def hook(self: ByteDetokenizer, *what: object) -> str:
        if self in broken:
            raise ZeroDivisionError
        return plain(self, *what)

    monkeypatch.setattr(ByteDetokenizer, moment, hook)
    world = World()
    hit = world.submit(rid="hit")
    spared = world.submit(rid="spared")
    first, second = (request.id for request in world.requests)
    broken.append(hit.completions[0]._detokenizer)  # type: ignore[arg-type]
    ends = tuple(Finish(id=id, reason="length") for id in (first, second))
    world.client.deliver(step(first, second, finished=ends))
    [delta] = hit.take()
    assert delta.end is not None
    assert delta.end.status == 500
    assert delta.end.message == "the output could not be decoded (ZeroDivisionError)"
    [other] = spared.take()
    assert other.end is not None
    assert other.text == "a"
    assert other.end.reason == "length"
    assert world.client.num_open == 0
