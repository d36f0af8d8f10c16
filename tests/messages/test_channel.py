"""The sockets between the processes."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
import zmq

from weft.messages import channel
from weft.messages.channel import AsyncReceiver, Receiver, Sender
from weft.messages.codec import decode_to_engine, encode
from weft.messages.control import GetState
from weft.messages.media import MediaItem
from weft.messages.requests import BatchGenerate, GenerateRequest
from weft.messages.sampling import SamplingParams

HANG_S = 240.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer is waited for as long as a busy machine may take."""
    monkeypatch.setattr(channel, "FIRST_PEER_MS", int(HANG_S * 1000))


def test_who_has_gone_is_not_waited_for_and_what_was_for_him_is_counted(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path / 'x'}"
    sender = Sender(context, address, bind=True)
    receiver = Receiver(context, address, decode_to_engine)
    sender.send(GetState(call=1))
    assert receiver.wait(HANG_S)
    receiver.close()
    while not sender.num_unsent:
        sender.send(GetState(call=2))
    for _ in range(1_000):
        sender.send(GetState(call=3))
    unsent = sender.num_unsent
    assert unsent >= 1_000
    sender.close()
    sender.send(GetState(call=4))
    assert sender.num_unsent == unsent + 1, "also what comes after the end"
    context.term()


def items_of(*sizes: int) -> tuple[MediaItem, ...]:
    """Items with so many bytes of values."""
    found = []
    for place, size in enumerate(sizes):
        digest = place.to_bytes(32, "little")
        values = bytes([place + 1]) * size
        item = MediaItem(kind="image", digest=digest, start=place, length=1, values=values)
        found.append(item)
    return tuple(found)


def test_values_of_media_come_beside_their_message(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path / 'x'}"
    sender = Sender(context, address, bind=True)
    receiver = Receiver(context, address, decode_to_engine)
    one = GenerateRequest(id=1, rid="a", sampling=SamplingParams(), media=items_of(3_000_000, 5, 0))
    plain = GenerateRequest(id=2, rid="b", sampling=SamplingParams())
    media = {0: items_of(7), 1: items_of(1, 2)}
    batch = BatchGenerate(prompts=[b"", b""], requests=[plain], prompt_of=[0], media=media)
    messages = [one, plain, batch, GetState(call=3)]
    for message in messages:
        sender.send(message)
    received: list[object] = []
    while len(received) < len(messages):
        assert receiver.wait(HANG_S)
        received += receiver.drain()
    assert received == messages
    assert receiver.num_dropped == 0
    receiver.close()
    sender.close()
    context.term()


@pytest.mark.parametrize("num_values", [1, 3, 4])
def test_a_message_with_other_values_than_media_is_dropped(tmp_path: Path, num_values: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path / 'x'}"
    push = context.socket(zmq.PUSH)
    push.bind(address)
    receiver = Receiver(context, address, decode_to_engine)
    request = GenerateRequest(id=1, rid="a", sampling=SamplingParams(), media=items_of(0, 0))
    push.send_multipart([encode(request), *[b"x"] * num_values])
    push.send(encode(GetState(call=1)))
    received: list[object] = []
    while not received:
        assert receiver.wait(HANG_S)
        received += receiver.drain()
    assert received == [GetState(call=1)]
    assert receiver.num_dropped == 1
    receiver.close()
    push.close()
    context.term()


def test_the_first_message_waits_for_a_peer_that_is_just_connecting(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path / 'x'}"
    sender = Sender(context, address, bind=True)
    found: list[int] = []

    def receive() -> None:
        time.sleep(0.1)
        receiver = Receiver(context, address, decode_to_engine)
        if receiver.wait(HANG_S):
            found.extend(
                message.call for message in receiver.drain() if isinstance(message, GetState)
            )
        receiver.close()

    thread = threading.Thread(target=receive)
    thread.start()
    sender.send(GetState(call=1))
    thread.join()
    assert found == [1]
    assert sender.num_unsent == 0
    sender.close()
    context.term()


def test_a_peer_that_looks_too_early_looks_again_within_milliseconds(tmp_path: Path) -> None:
    """The front's first message to an engine would stop all streams for as long."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    receiver = Receiver(context, f"ipc://{tmp_path / 'x'}", decode_to_engine)
    assert receiver._socket.getsockopt(zmq.RECONNECT_IVL) <= 5
    receiver.close()
    context.term()


def test_an_event_loop_gets_every_message_however_late_it_asks_and_counts_what_is_none(
    tmp_path: Path,
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path / 'x'}"

    async def work() -> list[int]:
        receiver = AsyncReceiver(context, address, decode_to_engine, bind=True)
        sender = Sender(context, address)
        found: list[int] = []
        for _ in range(3):  # once asleep, then with messages that wait, then asleep again
            asking = asyncio.create_task(receiver.receive())
            await asyncio.sleep(0.01)
            for call in range(100):
                sender.send(GetState(call=call))
            sender._socket.send(b"no message")
            found.append((await asyncio.wait_for(asking, HANG_S)).call)  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
            found += [(await asyncio.wait_for(receiver.receive(), HANG_S)).call for _ in range(99)]  # type: ignore[union-attr]
        sender.send(GetState(call=7))
        found.append((await asyncio.wait_for(receiver.receive(), HANG_S)).call)  # type: ignore[union-attr]
        assert receiver.num_dropped == 3
        receiver.close()
        sender.close()
        return found

    assert asyncio.run(work()) == [*range(100)] * 3 + [7]
    context.term()
