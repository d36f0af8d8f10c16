"""The profiler of a runner: a table, a trace, and steps that do not notice."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.executor.driver import MODEL, Driver, Turn, make_driver
from weft.config.numbers import MAX_PROFILED_STEPS
from weft.executor.profile.profile import ProfileState, RunnerProfiler, import_compiler
from weft.executor.profile.report import TraceEvent, main, spent_on, tables
from weft.plan.step import LAST_SAMPLED

HOW: dict[str, Any] = {
    "num_steps": None,
    "activities": [],
    "record_shapes": False,
    "with_stack": False,
    "profile_memory": False,
    "folder": "",
    "prefix": "",
}


class Bench:
    """A small model, and the profiler of its runner."""

    def __init__(
        self,
        root: Path | None,
        prepare: Callable[[], None] = import_compiler,
        driver: Driver | None = None,
    ) -> None:
        self.driver = driver or make_driver(MODEL)
        self.profiler = RunnerProfiler(self.driver.runner, root, has_gpu=False, prepare=prepare)
        self.num_steps = 0

    def start(self, **how: Any) -> str:
        while (name := self.profiler.start(**{**HOW, **how})) is None:
            time.sleep(0.01)
        return name

    def steps(self, num: int) -> list[int]:
        """The tokens that they sample."""
        sampled = []
        for _ in range(num):
            token = LAST_SAMPLED if self.num_steps else 5
            plan = self.driver.plan(Turn(0, [token]))
            plan = replace(plan, outputs=())
            sampled.append(int(self.driver.runner.launch(plan).result().tokens[0]))
            self.num_steps += 1
        return sampled

    def report(self) -> ProfileState:
        while (report := self.profiler.stop()).state == "writing":
            time.sleep(0.01)
        return report

    def close(self) -> None:
        self.driver.runner.close()


@pytest.fixture
def bench(tmp_path: Path):
    bench = Bench(tmp_path / "traces")
    yield bench
    bench.close()


def operations(trace: Path) -> list[str]:
    return [
        event.get("name", "")
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ]


def test_steps_are_recorded_between_start_and_stop_and_sample_the_same(
    bench: Bench, tmp_path: Path
) -> None:
    plain = Bench(None)
    expected = plain.steps(6)
    plain.close()
    got = bench.steps(2)
    name = bench.start(folder="a/b", prefix="mine", record_shapes=True)
    got += bench.steps(3)
    report = bench.report()
    got += bench.steps(1)
    assert got == expected
    assert report.state == "done"
    assert report.num_steps == 3
    assert report.trace == name
    assert name.startswith("a/b/mine-")
    assert report.table.startswith("CPU: ")
    assert "aten::" in report.table
    assert operations(tmp_path / "traces" / name).count("aten::embedding") == 3
    assert [path.name for path in (tmp_path / "traces" / "a/b").iterdir()] == [Path(name).name]


def test_steps_go_on_while_it_is_prepared(bench: Bench) -> None:
    begun = threading.Event()
    may_end = threading.Event()

    def prepare() -> None:
        begun.set()
        assert may_end.wait(240)

    slow = Bench(None, prepare)
    assert slow.profiler.start(**HOW) is None
    assert begun.wait(240)
    assert slow.steps(3) == bench.steps(3)
    assert slow.profiler.start(**HOW) is None
    assert slow.profiler.stop().state == "none"
    may_end.set()
    assert slow.start() == ""
    slow.steps(2)
    assert slow.report().num_steps == 2
    slow.close()


def test_it_stops_by_itself_after_the_number_of_steps(bench: Bench, tmp_path: Path) -> None:
    name = bench.start(num_steps=2)
    bench.steps(5)
    report = bench.report()
    assert report.num_steps == 2
    assert operations(tmp_path / "traces" / name).count("aten::embedding") == 2
    assert bench.report() == report  # asked again, it is the same


def test_only_one_profile_is_recorded_at_a_time_and_another_may_follow(bench: Bench) -> None:
    first = bench.start()
    with pytest.raises(ValueError, match="recording already"):
        bench.start()
    bench.steps(1)
    assert bench.report().state == "done"
    assert bench.start() != first
    bench.steps(1)
    assert bench.report().state == "done"


def test_without_a_folder_there_is_a_table_and_no_trace(tmp_path: Path) -> None:
    bench = Bench(None)
    assert bench.start(with_stack=True) == ""
    bench.steps(1)
    report = bench.report()
    bench.close()
    assert report.state == "done"
    assert report.trace == ""
    assert "aten::" in report.table
    with pytest.raises(ValueError, match="no --profile-dir"):
        bench.start(folder="x")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"folder": ".."}, "not below --profile-dir"),
        ({"folder": "a/../../b"}, "not below --profile-dir"),
        ({"folder": "/etc"}, "not below --profile-dir"),
        ({"folder": "link"}, "not below --profile-dir"),
        ({"folder": "file"}, "cannot be used"),
        ({"folder": "file/below"}, "cannot be used"),
        ({"folder": "nul\0"}, "null (byte|character)"),
        ({"prefix": "../x"}, "prefix"),
        ({"prefix": ".hidden"}, "prefix"),
        ({"prefix": "x" * 65}, "prefix"),
        ({"num_steps": 0}, f"1 to {MAX_PROFILED_STEPS}"),
        ({"num_steps": MAX_PROFILED_STEPS + 1}, f"1 to {MAX_PROFILED_STEPS}"),
        ({"activities": ["GPU"]}, "this device has CPU"),
        ({"activities": ["CPU", "MEM"]}, "'MEM'"),
    ],
)
def test_what_cannot_be_recorded_or_not_there_is_refused(
    bench: Bench, tmp_path: Path, how: dict[str, Any], message: str
) -> None:
    root = tmp_path / "traces"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    (root / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        bench.start(**how)
    assert sorted(tmp_path.rglob("*")) == before
    assert bench.report().state == "none"


def test_a_trace_that_cannot_be_written_is_reported_and_harms_nobody(
    bench: Bench, tmp_path: Path
) -> None:
    bench.start(folder="gone")
    (tmp_path / "traces" / "gone").rmdir()
    bench.steps(1)
    report = bench.report()
    assert report.state == "failed"
    assert "the profile could not be made" in report.message
    assert str(tmp_path) not in report.message
    bench.steps(1)


# The kernels of the CPU, of whose operations torch sees nothing


KERNEL_OPS = {  # of one step of the model: how often each, by the beginning of its name
    "weft::embed": 1,
    "weft::linear norm 16x32 store": 2,  # q, k and v of each layer
    "weft::rotary_store": 2,
    "weft::attention": 2,
    "weft::linear 16x16 add": 2,
    "weft::linear norm 16x48 gated_silu": 2,
    "weft::linear 24x16 add": 2,
    "weft::narrow": 2,
    "weft::linear norm 16x61 store": 1,
    "weft::mask": 1,
    "weft::argmax": 1,
}


@pytest.fixture
def kernels(tmp_path: Path):
    bench = Bench(tmp_path / "traces", driver=make_driver(MODEL, kernels="auto"))
    assert bench.driver.runner.kernels is not None
    yield bench
    bench.close()


def recorded(bench: Bench, root: Path, num_steps: int) -> tuple[ProfileState, list[dict[str, Any]]]:
    name = bench.start()
    bench.steps(num_steps)
    report = bench.report()
    trace = json.loads(gzip.decompress((root / name).read_bytes()))
    return report, [one for one in trace["traceEvents"] if one.get("name", "").startswith("weft::")]


def test_each_operation_of_the_kernels_is_reported_as_often_as_it_ran(
    kernels: Bench, tmp_path: Path
) -> None:
    kernels.steps(2)
    report, events = recorded(kernels, tmp_path / "traces", 5)
    operations = Counter(one["name"] for one in events if one["cat"] == "cpu_op")
    assert operations == {name: 5 * times for name, times in KERNEL_OPS.items()}
    lines = [line for line in report.table.splitlines() if "weft::" in line]
    told = {line.split("  ")[0].strip(): int(line.split()[-1]) for line in lines}
    assert len(told) > 5
    assert told.items() <= operations.items()


def test_the_operations_of_a_step_follow_each_other_and_fill_it(
    kernels: Bench, tmp_path: Path
) -> None:
    _, events = recorded(kernels, tmp_path / "traces", 4)
    steps = [one for one in events if one["cat"] == "weft_step"]
    operations = [one for one in events if one["cat"] == "cpu_op"]
    assert len(steps) == 4
    for step in steps:
        inside = [one for one in operations if step["ts"] <= one["ts"] < step["ts"] + step["dur"]]
        assert len(inside) == sum(KERNEL_OPS.values())
        assert [one["name"] for one in inside][:2] == [
            "weft::embed",
            "weft::linear norm 16x32 store",
        ]
        assert all(one["dur"] >= 0 for one in inside)
        assert sum(one["dur"] for one in inside) <= step["dur"] + 0.01  # microseconds, of rounding
    (tid,) = {one["tid"] for one in events}
    assert tid == events[0]["pid"]
    assert tid == "weft kernels"


def test_outside_of_a_profile_the_kernels_note_nothing(kernels: Bench, tmp_path: Path) -> None:
    expected = kernels.steps(3)
    library = kernels.driver.runner.kernels
    assert library is not None
    assert library.timings is None
    recorded(kernels, tmp_path / "traces", 2)
    assert library.timings is None
    other = Bench(None, driver=make_driver(MODEL, kernels="auto"))
    other.start()
    assert other.steps(3) == expected  # what is computed is the same
    other.report()
    other.close()


# The report


def span(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op") -> TraceEvent:
    return TraceEvent(ph="X", cat=cat, name=name, pid=1, tid=tid, ts=ts, dur=dur)


def test_time_is_counted_for_the_operation_that_spent_it() -> None:
    spent = spent_on(
        [
            span("mm", 30, 40),  # inside of addmm, inside of linear
            span("linear", 0, 100),
            span("addmm", 20, 70),
            span("mm", 100, 10),  # begins where linear ends
            span("mm", 35, 5, tid=2),  # of another thread
        ]
    )
    assert {name: (one.calls, one.own, one.total) for name, one in spent.items()} == {
        "linear": (1, 30, 100),
        "addmm": (1, 30, 70),
        "mm": (3, 55, 55),
    }


def test_an_operation_that_begins_when_another_one_ends_is_not_its_call() -> None:
    begins_us = [1e12 + 0.3 * index for index in range(100)]  # rounded to 0.0001
    events = [
        TraceEvent("X", "cpu_op", f"op{index % 2}", 1, 1, ts=at, dur=0.3)
        for index, at in enumerate(begins_us)
    ]
    spent = spent_on(events)
    for operation in spent.values():
        assert operation.own == pytest.approx(15.0)


def test_the_table_has_the_ten_that_took_most_of_the_cpu_and_of_the_gpu() -> None:
    events = [span(f"op{i}", 1_000 * i, 1 + i) for i in range(12)]
    lines = list(tables([*events, span("step", 0, 50_000, cat="user_annotation")]))
    assert lines[0] == "CPU: 0.078 ms in 12 operations"
    assert [line.split()[0] for line in lines[2:]] == [f"op{i}" for i in range(11, 1, -1)]
    lines = list(
        tables(
            [*events, span("gemm", 5, 400, cat="kernel"), span("copy", 500, 100, cat="gpu_memcpy")]
        )
    )
    assert lines[0] == "GPU: 0.500 ms in 2 operations"
    assert lines[2].split() == ["gemm", "0.400", "80.0", "0.400", "400.0", "1"]
    assert lines[5].startswith("CPU: ")


def test_a_trace_without_operations_has_an_empty_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.json").write_text(
        '{"traceEvents": [{"ph": "M", "name": "process_name", "pid": "x", "args": {}}]}'
    )
    (tmp_path / "spans.json").write_text("[]")
    main(tmp_path / "t.json", tmp_path / "spans.json", tmp_path / "t.gz")
    assert capsys.readouterr().out.startswith("CPU: 0.000 ms in 0 operations\n")
    assert operations(tmp_path / "t.gz") == ["process_name"]
