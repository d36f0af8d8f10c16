"""What the client of a played trace sees, and that it leaves when it is time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable

import numpy as np
import pytest

from weft.bench.http import HttpClient
from weft.bench.played import PlayedTrace, play
from weft.sim.trace import Arrival

PIECES = ([5], [6, 7, 8], [9])
NOTHING_KEPT = -1


class Streams:
    """Answers each completion with `PIECES`; of prompts that begin with `endless`, the end never
    comes."""

    def __init__(self, endless: int = NOTHING_KEPT) -> None:
        self._endless = endless
        self.is_asked = asyncio.Event()  # for an endless one
        self.is_left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b'{"data": [{"id": "some-model"}]}')
        else:
            [line] = [one for one in head.lower().splitlines() if b"content-length" in one]
            body = await reader.readexactly(int(line.split()[1]))
            async for event in self._events():
                writer.write(event)
            if json.loads(body)["prompt"][0] == self._endless:
                self.is_asked.set()
                await reader.read()
                self.is_left.set()
        writer.close()

    async def _events(self) -> AsyncIterator[bytes]:
        for piece in PIECES:
            data = json.dumps({"choices": [{"token_ids": piece}]})
            yield f"data: {data}\n\n".encode()


def arrival(token: int, after: int = -1) -> Arrival:
    prompt = np.array([token, 3], dtype=np.int32).tobytes()
    return Arrival(time_s=0.0, prompt=prompt, output_len=5, max_new_tokens=5, after=after)


async def played(
    streams: Streams, arrivals: list[Arrival], leaves: Awaitable[object] | None = None
) -> PlayedTrace:
    server = await asyncio.start_server(streams.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await play(HttpClient(f"http://127.0.0.1:{port}"), arrivals, leaves=leaves)


def test_each_token_of_an_event_counts_with_the_time_since_the_one_before() -> None:
    async def check() -> PlayedTrace:
        return await played(Streams(), [arrival(3), arrival(4, after=0)])

    trace = asyncio.run(check())
    assert [request.output for request in trace.requests] == [[5, 6, 7, 8, 9]] * 2
    assert [request.event_lens for request in trace.requests] == [[1, 3, 1]] * 2
    trace.record.gaps.percentile(50)
    assert trace.record.gaps._counts.sum() == 2 * 4
    assert trace.requests[1].sent_s >= trace.requests[0].end_s


@pytest.mark.parametrize("num_after", [0, 2])
def test_a_client_leaves_in_the_middle_of_an_answer(num_after: int) -> None:
    async def check() -> PlayedTrace:
        streams = Streams(endless=8)
        arrivals = [arrival(3), arrival(8, after=0), *[arrival(4, after=1)] * num_after]
        trace = await played(streams, arrivals, streams.is_asked.wait())
        await streams.is_left.wait()
        return trace

    complete, endless, *others = asyncio.run(check()).requests
    assert complete.output == [5, 6, 7, 8, 9]
    assert endless.error == ""
    assert not any(request.output for request in others)


def test_a_client_that_would_leave_later_waits_for_all_answers() -> None:
    async def check() -> PlayedTrace:
        return await played(Streams(), [arrival(3)], asyncio.Event().wait())

    assert asyncio.run(check()).requests[0].output == [5, 6, 7, 8, 9]
