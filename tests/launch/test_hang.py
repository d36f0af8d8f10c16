"""An engine that hangs: seen within five seconds, told to everybody, and not waited for for
ever."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
import zmq

from tests.launch.fake_machine import FOLLOWER, MAIN, SLICE_S, Machine, Watched
from tests.launch.server_process import ServerProcess, StreamError, eventually, is_alive
from tests.launch.tiny_model import write_tiny_model
from weft.client.engine_state import HANG_AFTER_S, LEAST_COUNTED, HangDetector
from weft.launch.heartbeat import ActivityMeter, HeartbeatSender
from weft.launch.processor_use import ProcessorUse, _times
from weft.messages.channel import Receiver
from weft.messages.codec import decode_from_engine
from weft.messages.status import Heartbeat


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def reason(server: ServerProcess, path: str) -> str:
    """Why `path` answers 503; empty if it does not."""
    answer = httpx.get(f"http://127.0.0.1:{server.port}{path}", timeout=240)
    return str(answer.json()["error"]["message"]) if answer.status_code == 503 else ""


def test_a_stopped_engine_is_noticed_reported_and_survived(model: Path) -> None:
    """Open and new requests are told at the same time, long before the server gives the engine
    up."""
    with ServerProcess(
        model, "--hang-timeout-s", "600", "--on-hang", "wait", behaviour="token_s=0.1"
    ) as server:
        stream = server.wait_ready().stream(200)
        next(stream)
        os.kill(server.engine_pid, signal.SIGSTOP)
        assert eventually(lambda: server.get("/health") == 503)
        assert "no sign of life" in reason(server, "/health")
        assert "no sign of life" in reason(server, "/ready")
        with pytest.raises(StreamError, match="no sign of life"):
            list(stream)
        with pytest.raises(StreamError, match="503"):
            next(server.stream(1))
        os.kill(server.engine_pid, signal.SIGCONT)
        assert eventually(lambda: server.get("/health") == 200)
        assert len("".join(server.stream(3))) == 3
        for event in ("error serve engine_hangs", "warning serve engine_recovered"):
            assert eventually(lambda event=event: any(event in line for line in server.lines))


def test_hung_engine_ends_the_server_with_the_reason(model: Path) -> None:
    with ServerProcess(
        model, "--hang-timeout-s", "0.5", "--hang-after-s", "2", behaviour="stuck"
    ) as server:
        with pytest.raises(StreamError, match="made no progress in a step"):
            list(server.wait_ready().stream(5))
        assert server.end() == 1
        assert "made no progress in a step" in server.lines[-1]
        assert not is_alive(server.engine_pid)
        assert server.socket_folders == []


def test_heartbeats_come_while_a_step_runs() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    receiver = Receiver(context, "inproc://heart", decode_from_engine, bind=True)
    heartbeat = HeartbeatSender(context, "inproc://heart")
    heartbeat.start()

    def beat() -> Heartbeat:
        assert receiver.wait(240)
        return [message for message in receiver.drain() if isinstance(message, Heartbeat)][-1]

    with heartbeat:
        assert 0 < beat().step_s < beat().step_s
    beat()  # it may be one of the step
    assert beat().step_s == 0
    heartbeat.stop()
    receiver.close()
    context.term()


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["python", "a b", ") R (", "", "(1) S 2"])
@pytest.mark.parametrize(("user", "system"), [(0, 0), (300, 0), (0, 70), (300, 70)])
@pytest.mark.parametrize("state", ["R", "D", "S", "T"])
def test_the_totals_of_a_thread_are_those_of_the_kernel(
    tmp_path: Path, name: str, user: int, system: int, state: str
) -> None:
    """Whatever its process is called. Source: proc(5), /proc/[pid]/stat."""
    others = " ".join(str(number) for number in range(1_000, 1_035))
    children = "11 12"  # of which it has waited for the end
    (tmp_path / "stat").write_text(
        f"9 ({name}) {state} 1 2 3 4 5 6 7 8 9 10 {user} {system} {children} {others}\n"
    )
    is_delayed = state in ("R", "D")
    ticks_s = os.sysconf("SC_CLK_TCK")
    assert _times(tmp_path) == ((user + system) / ticks_s, 0.0, is_delayed)
    (tmp_path / "schedstat").write_text("2000000000 500000000 77\n")
    assert _times(tmp_path) == pytest.approx((2.0, 0.5, is_delayed))


@pytest.mark.parametrize(("used_s", "waited_s"), [(0.0, 0.25), (0.25, 0.0), (0.5, 0.75)])
def test_times_of_a_new_thread_count_from_its_beginning(
    tmp_path: Path, used_s: float, waited_s: float
) -> None:
    def write(thread: int, used_s: float, waited_s: float) -> None:
        folder = tmp_path / "7" / "task" / str(thread)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{thread} (x) S 1 7 7 0 -1 0 1 0 0 0 0 0 3 8 20")
        (folder / "schedstat").write_text(f"{int(used_s * 1e9)} {int(waited_s * 1e9)} 1\n")

    write(7, 3.0, 4.0)
    use = ProcessorUse([7], proc=tmp_path)
    assert use.look(2.0) == (0.0, 0.0)
    write(1, used_s, waited_s)  # a number as low as any
    assert use.look(2.0) == pytest.approx((used_s, waited_s))


LOADS = [1, 15, 500]
BOUND_S = HANG_AFTER_S / LEAST_COUNTED


@pytest.fixture(params=[True, False], ids=["waiting is counted", "only states are known"])
def counts_waiting(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("looks", ["R", "S"])
def test_an_engine_that_computes_is_never_taken_to_hang_by_its_beats(
    tmp_path: Path, load: float, looks: str
) -> None:
    """Also if its thread waits for Python's lock whenever somebody looks."""
    machine = Machine(tmp_path, load)
    machine.computes = {MAIN}
    machine.threads[MAIN].looks = looks
    assert Watched(machine, HangDetector(300.0)).beats(30.0, 0.0) == math.inf


@pytest.mark.parametrize("load", [1, 2, 15])
def test_without_the_time_of_waiting_the_states_of_threads_tell(
    tmp_path: Path, load: float
) -> None:
    machine = Machine(tmp_path, load, counts_waiting=False)
    machine.computes = {MAIN}
    assert Watched(machine, HangDetector()).beats(30.0, 0.0) == math.inf


@pytest.mark.parametrize("load", LOADS)
def test_a_step_that_waits_for_a_follower_makes_the_follower_s_progress(
    tmp_path: Path, load: float
) -> None:
    machine = Machine(tmp_path, load)
    machine.computes = {FOLLOWER}
    assert Watched(machine, HangDetector()).beats(30.0, 0.0) == math.inf


@pytest.mark.parametrize("state", ["D", "R"])
def test_an_engine_that_waits_for_a_disk_or_a_processor_has_more_but_limited_time(
    tmp_path: Path, state: str
) -> None:
    machine = Machine(tmp_path, 1)
    machine.threads[MAIN].looks = state
    seen_s = Watched(machine, HangDetector()).beats(200.0, 0.0)
    assert HANG_AFTER_S < seen_s <= BOUND_S + 1


@pytest.mark.parametrize("load", LOADS)
def test_a_deadlock_is_found_within_a_bound_at_any_load(
    tmp_path: Path, load: float, counts_waiting: bool
) -> None:
    """Threads that send messages go on, and wait for a processor each time."""
    machine = Machine(tmp_path, load, counts_waiting=counts_waiting)
    seen_s = Watched(machine, HangDetector()).beats(2 * BOUND_S, 0.0)
    assert seen_s <= BOUND_S + load * SLICE_S
    if load <= 15:
        assert seen_s <= 1.5 * HANG_AFTER_S


@pytest.mark.parametrize("load", LOADS)
def test_a_stopped_engine_is_found_at_once_at_any_load(
    tmp_path: Path, load: float, counts_waiting: bool
) -> None:
    machine = Machine(tmp_path, load, counts_waiting=counts_waiting)
    machine.computes = {MAIN}
    machine.move(10.0)
    machine.stop()
    assert Watched(machine, HangDetector()).silence(100.0) == HANG_AFTER_S


@pytest.mark.parametrize("load", LOADS)
def test_a_loop_that_lets_no_other_thread_run_is_found_within_a_bound(
    tmp_path: Path, load: float
) -> None:
    """Native code that keeps Python's lock: no beat comes while it computes. It has as much
    processor time as on a free machine, within the bound."""
    machine = Machine(tmp_path, load)
    machine.computes = {MAIN}
    seen_s = Watched(machine, HangDetector()).silence(2 * BOUND_S)
    assert seen_s <= BOUND_S
    assert seen_s >= 0.8 * min(HANG_AFTER_S * load, BOUND_S)  # the first tick is not looked at
    assert load > 1 or seen_s < 5


@pytest.mark.parametrize("load", LOADS)
def test_a_loop_that_lets_others_run_is_found_by_the_longest_step(
    tmp_path: Path, load: float
) -> None:
    machine = Machine(tmp_path, load)
    machine.computes = {MAIN}
    seen_s = Watched(machine, HangDetector(30.0)).beats(40.0, 0.0)
    assert 30.0 <= seen_s <= 31.0 + load * SLICE_S


def test_time_without_a_step_or_without_the_process_is_no_standstill(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1)
    watched = Watched(machine, HangDetector())
    assert watched.beats(60.0, None) == math.inf
    began_s = machine.now
    machine.move(3_600.0)  # a laptop sleeps in the midst of the step
    watched.detector.beat(watched.meter.beat(machine.now, machine.used_s, began_s))
    assert not watched.detector.hang
    assert watched.beats(60.0, began_s) <= HANG_AFTER_S


def test_a_system_without_proc_counts_all_but_beats_that_are_late(tmp_path: Path) -> None:
    use = ProcessorUse([7], proc=tmp_path / "none")
    assert use.look(0.5) is None
    meter = ActivityMeter(100.0, 7.0, use)
    assert meter.beat(100.5, 7.5, 100.0) == Heartbeat(step_s=0.5, idle_s=0.0)
    for half in range(1, 9):
        beat = meter.beat(100.5 + half / 2, 7.5 + half / 10_000, 100.0)
        assert beat == Heartbeat(step_s=0.5 + half / 2, idle_s=half / 2)
    assert meter.beat(106.5, 7.501, 100.0).idle_s == 4.0 + 2.0 * LEAST_COUNTED
    assert meter.beat(107.0, 7.6, None) == Heartbeat(step_s=0.0, idle_s=0.0)
    for passed_s, counted_s in ((0.5, 0.5), (0.75, 0.5), (0.76, 0.76 * LEAST_COUNTED)):
        fresh = ActivityMeter(100.0, 7.0, use)
        assert fresh.beat(100.0 + passed_s, 7.0, 99.0).idle_s == pytest.approx(counted_s)


def test_the_kernel_s_numbers_of_a_thread_that_computes_here() -> None:
    """This process computes, and /proc of this machine says so."""
    use = ProcessorUse([os.getpid()])
    if use.look(1e9) is None:
        pytest.skip("no /proc")
    began_s = time.thread_time()
    while time.thread_time() - began_s < 0.05:
        pass
    found = use.look(1e9)
    assert found is not None
    assert found.used_s >= 0.02
    assert 0.0 <= found.share <= 1.0
    assert ProcessorUse([os.getpid()], but=threading.get_native_id()).look(1.0) is not None
