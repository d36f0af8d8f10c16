"""A model on several nodes: who belongs to it, who is told why not, and how its nodes end. The
nodes are processes of this machine; `nodes_proof.py` has two machines."""

from __future__ import annotations

import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.e2e.server import start, wait_until
from tests.launch.loaded import SETTINGS, answers, load
from tests.launch.ports import free_port
from tests.nano_adapters import NANO
from weft.assemble.model_config import choose_model
from weft.assemble.node_facts import facts_of
from weft.assemble.nodes import NodeMissing, OtherNodes
from weft.assemble.prepare import prepare
from weft.config.engine import EngineConfig
from weft.config.nodes import address_of, ranks_of
from weft.config.options import SettingsError
from weft.config.server import ServerConfig
from weft.launch.listen import listen
from weft.launch.node import NodeEnd, NodeFollower
from weft.launch.node_health import NodeHealth, answering
from weft.parallel.door import BEAT_S, Silence
from weft.parallel.links import Loss

HANG_S = 240.0


def settings_of(port: int, **changed: Any) -> EngineConfig:
    two = {"tp_size": 2, "nnodes": 2, "dist_init_addr": f"127.0.0.1:{port}", "dist_secret": "hush"}
    return EngineConfig(**{**SETTINGS, **two, **changed})


@contextmanager
def node_0(
    port: int, change: Callable[[dict[str, str]], None] = lambda facts: None
) -> Iterator[tuple[OtherNodes, Future[None]]]:
    """Node 0 as far as others see it, waiting for them; `change`s what it knows of its model."""
    prepared = prepare(settings_of(port))
    facts = facts_of(prepared.config, choose_model(prepared.config, NANO), NANO)
    change(facts)
    nodes = OtherNodes(prepared.config, facts, Loss())
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(nodes.await_all, lambda reason: None)
        try:
            yield nodes, waiting
        finally:
            nodes._loss.tell("the test is over")
            waiting.exception(HANG_S)
            nodes.take_leave()
            nodes.close()


def end_of_node(config: EngineConfig) -> NodeEnd:
    """How a node ends with such settings."""
    node = NodeFollower(config, ServerConfig(), NANO, choose_model(config, NANO))
    try:
        with pytest.raises(NodeEnd) as caught:
            node.run()
    finally:
        node.close()
    return caught.value


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dtype": "bfloat16"}, "--dtype is bfloat16 here, and float32 on node 0"),
        ({"tp_size": 4}, "--tp-size is 4 here, and 2 on node 0"),
        ({"nnodes": 3, "tp_size": 3, "node_rank": 2}, "--nnodes is 3 here, and 2 on node 0"),
        ({"dist_secret": "other"}, "it has another secret"),
    ],
)
def test_a_node_with_other_settings_learns_which(changed: dict[str, Any], why: str) -> None:
    port = free_port()
    with node_0(port) as (_, waiting):
        end = end_of_node(settings_of(port, **{"node_rank": 1, **changed}))
        assert why in str(end)
        assert end.status == 2
        assert not waiting.done()


@pytest.mark.parametrize("name", ["version of weft", "shape of the model", "weights"])
def test_a_node_with_another_model_or_version_is_refused(name: str) -> None:
    port = free_port()
    with node_0(port, lambda facts: facts.update({name: "another"})):
        end = end_of_node(settings_of(port, node_rank=1))
    assert f"the {name} differs: another on node 0" in str(end)


def test_nodes_that_do_not_come_are_named() -> None:
    prepared = prepare(settings_of(free_port()))
    nodes = OtherNodes(prepared.config, {}, Loss())
    object.__setattr__(nodes._terms.config, "dist_timeout", 0.2)
    with pytest.raises(NodeMissing, match=r"node 1 did not join node 0 at 127.* within 0.2 s"):
        nodes.await_all(lambda reason: None)
    nodes.take_leave()
    nodes.close()


def test_a_node_whose_node_0_does_not_answer_says_so() -> None:
    config = settings_of(free_port(), node_rank=1, dist_timeout=1.0)
    end = end_of_node(config)
    assert "node 0 did not answer at 127.0.0.1" in str(end)
    assert end.status == 2


def test_a_place_that_others_reach_needs_a_secret() -> None:
    with pytest.raises(SettingsError, match="WEFT_DIST_SECRET"):
        prepare(settings_of(31400, dist_init_addr="192.0.2.1:31400", dist_secret=""))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dist_init_addr": ""}, "needs --dist-init-addr"),
        ({"dist_init_addr": "somewhere"}, "it is HOST:PORT"),
        ({"tp_size": 3}, "does not divide --tp-size"),
        ({"node_rank": 2}, "it is 0 to 1"),
        ({"node_rank": 1}, "only weft serve follows another node"),
        ({"dist_backend": "shm"}, "the 2 nodes share no memory"),
        ({"nnodes": 1, "node_rank": 1}, "there is only one node"),
        ({"dist_init_addr": "192.0.2.1:31400"}, "cannot listen on 192.0.2.1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        OtherNodes(prepare(settings_of(31400, **changed)).config, {}, Loss())


def test_ranks_are_shared_out_in_order() -> None:
    config = EngineConfig(tp_size=6, nnodes=3, dist_init_addr="[::1]:5")
    assert [list(ranks_of(config, node)) for node in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert address_of(config) == ("::1", 5)


def test_a_machine_that_stood_still_finds_nobody_silent() -> None:
    silence = Silence(0.0)
    assert not any(silence.tick(beat * BEAT_S, 4.0) for beat in range(1, 9))
    assert not silence.tick(100.0, 4.0)  # it did not run in between
    assert not any(silence.tick(100.0 + beat * BEAT_S, 4.0) for beat in range(1, 8))
    assert silence.tick(104.0, 4.0)


@contextmanager
def following(port: int) -> Iterator[tuple[NodeFollower, Future[None]]]:
    """A node that has come, without processes for its ranks."""
    config = settings_of(port, node_rank=1)
    node = NodeFollower(config, ServerConfig(), NANO, choose_model(config, NANO))
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as threads:
        patch.setattr(node, "_start", lambda *args: None)
        try:
            yield node, threads.submit(node.run)
        finally:
            node._lost.append("the test is over")
    node.close()


@pytest.mark.parametrize(
    ("reason", "status", "line"),
    [
        ("", 0, "node 0 has ended"),
        ("rank 1 failed", 1, "node 0 has ended: rank 1 failed"),
    ],
)
def test_a_node_ends_when_node_0_does(reason: str, status: int, line: str) -> None:
    port = free_port()
    with node_0(port) as (nodes, waiting), following(port) as (_, running):
        waiting.result(HANG_S)
        nodes.take_leave(reason)
        end = running.exception(HANG_S)
    assert isinstance(end, NodeEnd)
    assert end.status == status
    assert str(end) == line


def test_node_0_hears_why_another_node_is_lost_and_takes_no_second_one_for_it() -> None:
    port = free_port()
    told = threading.Event()
    with node_0(port) as (nodes, waiting), following(port) as (node, running):
        waiting.result(HANG_S)
        nodes._on_lost = lambda reason: told.set()
        second = end_of_node(settings_of(port, node_rank=1))
        assert str(second).endswith(
            "--node-rank is 1, and a node with this number has joined already"
        )
        node._lost.append("rank 1 was ended by SIGBUS (signal 7)")
        assert told.wait(HANG_S)
        assert nodes._loss.reason == "rank 1 was ended by SIGBUS (signal 7)"
        end = running.exception(HANG_S)
        assert isinstance(end, NodeEnd)
        assert end.status == 1


def asked(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """The status and the text of an answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def test_a_node_is_healthy_while_it_follows() -> None:
    port = free_port()
    config = settings_of(port, node_rank=1)
    node = NodeFollower(config, ServerConfig(), NANO, choose_model(config, NANO))
    assert node.health.why_not() == "node 1 of 2: it waits for node 0"
    node.close()
    with node_0(port) as (nodes, waiting), following(port) as (node, _):
        waiting.result(HANG_S)
        assert wait_until(
            lambda: node.health.why_not() == "node 1 of 2: its ranks are being loaded"
        )
        nodes.tell_serving()
        assert wait_until(lambda: not node.health.why_not())


def test_probes_of_a_node_are_answered_and_nothing_else() -> None:
    health = NodeHealth(1, 2)
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with answering(health, listener, ServerConfig()):
            status, text = asked(port, "/health")
            assert status == 503
            assert "node 1 of 2: it waits for node 0" in text
            health.tell("")
            for path in ("/health", "/ping", "/ready"):
                assert asked(port, path) == (200, "")
                assert asked(port, path, "HEAD") == (200, "")
                assert asked(port, path, "POST")[0] == 405
            for path in ("/", "/v1/models", "/health_generate"):
                status, text = asked(port, path)
                assert status == 404
                assert "answers only /health, /ping, /ready; node 0 serves" in text
    with pytest.raises(OSError, match="refused"):
        asked(port, "/health")


def test_a_node_whose_thread_stands_still_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    health = NodeHealth(1, 2)
    health.tell("")
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 30)
    assert health.why_not() == "node 1 of 2: it has stood still for 30 s"
    health.goes_on()
    assert not health.why_not()


class FollowingNode:
    """`weft serve` with `--node-rank 1`."""

    def __init__(self, port: int) -> None:
        self.port = free_port()  # for probes
        words = ["serve", str(NANO), "--tp-size", "2", "--nnodes", "2", "--node-rank", "1"]
        words += ["--threads", "1", "--dist-init-addr", f"127.0.0.1:{port}"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WEFT_DIST_SECRET", "hush")
            self.process = start([*words, "--port", str(self.port)])

    def ranks(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "weft.launch.follower" in child.cmdline()]

    def end(self) -> tuple[int, str]:
        """The exit status, and the last line."""
        assert self.process.stderr is not None
        text = self.process.stderr.read()
        return self.process.wait(HANG_S), text.splitlines()[-1]

    def kill(self) -> None:
        assert self.process.stderr is not None
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


def test_two_nodes_answer_as_one_rank_and_a_killed_rank_is_named_on_both() -> None:
    """Node 0 is this process."""
    port = free_port()
    one = load()
    node = FollowingNode(port)
    try:
        where = f"127.0.0.1:{port}"
        two = load(tp_size=2, nnodes=2, dist_init_addr=where, dist_secret="hush")
        assert answers(two.llm, 14) == answers(one.llm, 14)
        assert wait_until(lambda: asked(node.port, "/health") == (200, ""))
        told = threading.Event()
        reasons: list[str] = []
        ranks = two.built.ranks
        assert ranks is not None
        ranks.on_lost(lambda reason: (reasons.append(reason), told.set()))
        (rank,) = node.ranks()
        rank.send_signal(signal.SIGKILL)
        assert told.wait(HANG_S)
        assert reasons == ["rank 1 was ended by SIGKILL (signal 9)"]
        assert node.end() == (1, "weft: rank 1 was ended by SIGKILL (signal 9)")
        assert not rank.is_running()
        two.close()
    finally:
        node.kill()
