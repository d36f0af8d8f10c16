"""Batches through real sockets: who follows from the first one, who comes late, who was away."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from tests.engine.engine_world import EngineWorld
from tests.kv_events.readers import Blocks, blocks_of, example
from tests.scheduler.random_worlds import random_settings
from tests.scheduler.scenes import settings
from weft.config.kv_events import KvEventsConfig
from weft.config.options import SettingsError
from weft.kv_events.publisher import KvEventPublisher
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.cache import RadixCache
from weft.messages.control import FlushCache

HANG_MS = 60_000
follower_of = example().CacheFollower


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


# As readers of today's and of earlier vLLM declare them.
class StoredMap(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class RemovedMap(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class StoredRow(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class RemovedRow(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int]
    medium: str | None


class ClearedRow(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class MapBatch(Batch, array_like=True):
    events: list[StoredMap | RemovedMap | ClearedMap]


class RowBatch(Batch, array_like=True):
    events: list[StoredRow | RemovedRow | ClearedRow]


class Published:
    """A tree whose changes are published, at addresses in a folder."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.events = f"ipc://{folder}/events"
        self.replay = f"ipc://{folder}/replay"
        given = {"publisher": "zmq", "endpoint": self.events, "replay_endpoint": self.replay}
        self.publisher = KvEventPublisher(KvEventsConfig(**(given | config)), page_size=2)
        self.cache = RadixCache(page_size=2)
        self.cache.tree.listeners.append(self.publisher)
        self.publisher.emptied()
        self.publisher.publish()
        self.publisher.start()

    def insert(self, *tokens: int) -> None:
        pages = np.arange(len(tokens) // 2, dtype=np.int32)
        self.cache.insert(CacheKey("", np.array(tokens, np.int32).tobytes()), pages)
        self.publisher.publish()

    def ask(self, question: bytes) -> list[bytes]:
        """The payloads behind a question, without the mark of the end."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.replay)
            socket.send_multipart([b"", question])
            found: list[bytes] = []
            while True:
                assert socket.poll(HANG_MS)
                _, number, payload = socket.recv_multipart()
                if not payload:
                    assert number == b"\xff" * 8
                    return found
                found.append(payload)


@pytest.fixture
def published(tmp_path: Path) -> Iterator[Published]:
    server = Published(tmp_path)
    yield server
    server.publisher.stop()


def joined(server: Published) -> Any:
    """A follower that hears what is published: before its socket is connected, all is lost."""
    follower = follower_of(server.events, server.replay)
    token = 1_000
    while follower._heard < 0:
        server.insert(token, token)
        token += 1
        follower.follow(20)
    follower.catch_up()
    while follower._heard < follower.last:
        assert follower.follow(HANG_MS)
    return follower


def until_equal(follower: Any, blocks: Blocks) -> None:
    while follower.blocks != blocks:
        assert follower.follow(HANG_MS), (follower.blocks, blocks)


def test_a_subscriber_hears_of_each_change(published: Published) -> None:
    follower = joined(published)
    published.insert(1, 2, 3, 4)
    published.insert(1, 2, 5, 6)
    published.publisher.publish()
    follower.catch_up()
    assert follower.blocks == blocks_of(published.cache)
    before = follower.last
    published.cache.evict(1)
    published.publisher.publish()
    until_equal(follower, blocks_of(published.cache))
    assert follower.last == before + 1, "a step that changes something is one batch"
    published.publisher.publish()
    follower.catch_up()
    assert follower.last == before + 1, "a step that changes nothing is none"
    follower.close()


def test_who_comes_late_gets_what_is_kept_or_the_whole_tree(tmp_path: Path) -> None:
    server = Published(tmp_path, buffer_steps=3)
    for i in range(10):
        server.insert(i, i, i, i + 1)
    follower = follower_of(server.events, server.replay)
    assert follower.blocks == blocks_of(server.cache)
    assert len(follower.blocks) == 20
    assert len(server.ask((follower.last - 1).to_bytes(8, "big"))) == 2
    assert len(server.ask((follower.last - 3).to_bytes(8, "big"))) == 1, "the whole tree"
    assert server.ask((follower.last + 1).to_bytes(8, "big")) == []
    server.insert(7, 7, 9, 9)
    follower.catch_up()
    assert follower.blocks == blocks_of(server.cache)
    follower.close()
    server.publisher.stop()


def test_a_subscriber_that_was_away_finds_its_way_back(published: Published) -> None:
    follower = joined(published)
    published.insert(1, 2, 3, 4)
    until_equal(follower, blocks_of(published.cache))
    follower.blocks.clear()
    follower.catch_up(0)
    published.insert(1, 2, 3, 4, 5, 6)
    until_equal(follower, blocks_of(published.cache))
    follower.last -= 1  # as if it had missed this one
    published.insert(1, 2, 3, 4, 5, 6, 7, 8)  # comes behind a gap
    until_equal(follower, blocks_of(published.cache))
    follower.close()


def test_numbers_rise_over_a_restart_and_the_first_batch_clears(tmp_path: Path) -> None:
    first = Published(tmp_path)
    first.insert(1, 2, 3, 4)
    follower = follower_of(first.events, first.replay)
    assert len(follower.blocks) == 2
    first.publisher.stop()
    second = Published(tmp_path)
    second.insert(5, 6)
    follower.catch_up()
    assert follower.blocks == blocks_of(second.cache)
    assert len(follower.blocks) == 1
    follower.close()
    second.publisher.stop()


def test_questions_that_nobody_could_have_meant_are_left_alone(published: Published) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(published.replay)
        for frames in ([b"what?"], [b"", b"1"], [b"", bytes(8), b"more"]):
            socket.send_multipart(frames)
    assert len(published.ask(bytes(8))) == 1


def test_a_queue_that_grows_too_long_becomes_one_batch(tmp_path: Path) -> None:
    events = KvEventsConfig(
        publisher="zmq",
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        max_queue_size=3,
    )
    publisher = KvEventPublisher(events, page_size=1)
    cache = RadixCache(page_size=1)
    cache.tree.listeners.append(publisher)
    for i in range(10):
        cache.insert(CacheKey("", np.array([i], np.int32).tobytes()), np.array([i], np.int32))
        publisher.publish()
    publisher.start()
    follower = follower_of(events.address, events.replay_endpoint)
    assert follower.blocks == blocks_of(cache)
    assert len(publisher._stream._kept) == 1
    follower.close()
    publisher.stop()


@pytest.mark.parametrize(("encoding", "declared"), [("map", MapBatch), ("array", RowBatch)])
def test_readers_of_vllm_read_a_batch(tmp_path: Path, encoding: str, declared: Any) -> None:
    server = Published(tmp_path, encoding=encoding, data_parallel_rank=3)
    server.insert(1, 2, 3, 4)
    server.cache.evict(1)
    server.publisher.publish()
    found = [msgspec.msgpack.decode(one, type=declared) for one in server.ask(bytes(8))]
    server.publisher.stop()
    (whole,) = found
    cleared, stored = whole.events
    assert whole.data_parallel_rank == 3
    assert type(cleared) in (ClearedMap, ClearedRow)
    assert (stored.token_ids, stored.block_size, stored.medium) == ([1, 2], 2, "GPU")
    assert stored.parent_block_hash is None


def test_an_address_that_is_taken_is_an_error_of_the_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        config = KvEventsConfig(publisher="zmq", endpoint=address, bind=True)
        with pytest.raises(SettingsError, match=f"listen on {address}: Address already in use"):
            KvEventPublisher(config, 1).start()


@pytest.mark.parametrize("seed", range(6))
def test_a_subscriber_has_the_tree_of_an_engine_after_any_run(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    chosen = random_settings(rng)
    config = KvEventsConfig(
        publisher="zmq",
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        buffer_steps=rng.choice([2, 10, 10_000]),
    )
    follower = None
    for _ in range(2):  # the engine is started a second time
        publisher = KvEventPublisher(config, chosen.page_size)
        publisher.start()
        world = EngineWorld(chosen, cache_events=publisher)
        cache = world.scheduler.kv.cache
        if follower is None:
            follower = follower_of(config.address, config.replay_endpoint)
        for turn in range(60):
            if rng.random() < 0.4:
                start = [rng.randrange(3)] * rng.randrange(1, 20)
                salt = rng.choice(["", "", "a"])
                world.send([*start, *range(5, 5 + rng.randrange(20))], salt=salt)
            if rng.random() < 0.05:
                world.tell(FlushCache(call=turn, timeout_s=0.0))
            world.step()
            if rng.random() < 0.1:
                follower.catch_up()
                assert follower.blocks == blocks_of(cache)
        world.run_dry()
        follower.catch_up()
        assert follower.blocks == blocks_of(cache)
        publisher.stop()
    follower.close()


def test_an_engine_that_nobody_follows_tells_nothing() -> None:
    world = EngineWorld(settings())
    assert world.scheduler.kv.cache.tree.listeners == []
