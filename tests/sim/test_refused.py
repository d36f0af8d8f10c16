"""Requests that were refused, ended or left, from a journal: they are traffic, too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sim.records import COST, Records, record, recorded_engine
from tests.sim.scene import SCENE
from weft.cli import sim as command
from weft.config.options import SettingsError
from weft.journal.file import JournalWriter
from weft.journal.recorder import RecordedEngine
from weft.messages.replies import Finish
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.sim.cluster import simulate_cluster
from weft.sim.journal import Journal, read_journal
from weft.sim.lengths import OutputLengths
from weft.sim.outcome import ABORTED, DONE, FAILED, INVALID, REFUSED, why_refused
from weft.sim.report import Slo, by_tenant, summarize
from weft.sim.run import simulate
from weft.sim.trace import Arrival, Segment

# Two rows, and one place to wait; the bound on steps lets it estimate waits.
NARROW = replace(SCENE, max_running_requests=2, max_queued_requests=1, max_step_ms=1_000.0)
WIDE = replace(NARROW, max_running_requests=8, max_queued_requests=100, context_length=1_024)


def one(time_s: float, key: int, **wishes: Any) -> Arrival:
    arrival = Arrival(time_s, (Segment(key, 30),), 40, 60, tenant="alice")
    return arrival._replace(**wishes)


TRAFFIC = [
    one(0.0, 0),
    one(0.0, 1, output_len=20),
    one(0.05, 2),  # waits
    one(0.1, 3, tenant="bob", priority=3, timeout_ms=5_000),  # there is no place to wait
    one(2.0, 4),
    one(2.0, 5),
    one(2.1, 6, tenant="bob", leaves_s=0.05),  # leaves the queue
    one(2.2, 7, tenant="bob", timeout_ms=50),  # its time is over in the queue
    one(2.3, 8, tenant="bob", ttft_ms=30),  # cannot begin so soon
    one(3.0, 9, timeout_ms=150),  # its time is over in the midst
    one(4.0, 10, max_new_tokens=600),  # longer than the context
    one(4.1, 11, adapter="none-such"),
]
ENDS = {
    "queue full": 1,
    "ttft_ms": 1,
    "not begun in time": 1,
    "not ended in time": 1,
    "too long": 1,
}


@pytest.fixture(scope="module")
def records() -> Records:
    return record(arrivals=TRAFFIC, settings=NARROW)


@pytest.fixture(scope="module")
def journal(records: Records) -> Journal:
    return read_journal(records)


def test_the_recorded_run_says_what_became_of_each_request(journal: Journal) -> None:
    recorded = summarize(journal.record, Slo())
    assert recorded.requests == 11
    assert recorded.finished == 5
    assert recorded.aborted == 1
    assert recorded.refused_by == ENDS
    assert journal.num_open == 0
    assert journal.num_invalid == 1
    assert journal.num_guessed == 6


def test_under_the_settings_of_then_the_same_requests_are_refused_for_the_same_reasons(
    journal: Journal,
) -> None:
    again = simulate(journal.settings, COST, journal.arrivals)
    assert again.state.tolist() == journal.record.state.tolist()
    assert again.output_len.tolist() == journal.record.output_len.tolist()
    assert summarize(again, Slo()).refused_by == ENDS


def test_with_more_room_refused_requests_are_taken_with_the_wishes_that_they_had(
    journal: Journal,
) -> None:
    waited = journal.arrivals[3]
    assert waited.tenant == "bob"
    assert waited.priority == 3
    assert waited.timeout_ms == 5_000
    assert waited.prompt == read_journal(record(arrivals=[TRAFFIC[3]])).arrivals[0].prompt
    assert [one.ttft_ms for one in journal.arrivals] == [0] * 8 + [30, 0, 0]
    wide = summarize(simulate(WIDE, COST, journal.arrivals), Slo())
    assert wide.refused_by == {"not ended in time": 2}
    assert wide.finished == 8
    assert wide.aborted == 1


def test_the_output_of_a_refused_request_is_as_long_as_those_of_its_tenant(
    journal: Journal,
) -> None:
    # bob finished none: the mean of everybody's, 20 and four times 40.
    assert [journal.arrivals[place].output_len for place in (3, 6, 7, 8)] == [36] * 4
    # alice's was ended behind 15 tokens: those of hers that became longer.
    assert 0 < journal.record.output_len[9] < 20
    assert journal.arrivals[9].output_len == 36
    known = np.frombuffer(journal.arrivals[9].output, dtype=np.int32)
    assert len(known) == 36


def test_a_guess_is_bounded_by_what_the_request_asked_for() -> None:
    lengths = OutputLengths()
    assert lengths.guess("a", beyond=0, bound=70) == 70
    for length in (10, 20, 60):
        lengths.note("a", length)
    lengths.note("b", 100)
    assert lengths.guess("a", beyond=0, bound=70) == 30
    assert lengths.guess("a", beyond=15, bound=70) == 40
    assert lengths.guess("a", beyond=60, bound=70) == 70
    assert lengths.guess("a", beyond=60, bound=200) == 100
    assert lengths.guess("c", beyond=0, bound=200) == round(190 / 4)


def test_a_request_that_ignores_ends_is_as_long_as_it_asked_for() -> None:
    sent = [one(0.0, 0), one(0.0, 1), one(0.0, 2), one(0.1, 3), one(0.1, 4, ignore_eos=True)]
    arrivals = read_journal(record(arrivals=sent, settings=NARROW)).arrivals
    assert [(a.output_len, a.ignore_eos) for a in arrivals[3:]] == [(40, False), (60, True)]


def test_a_client_that_leaves_before_its_first_token_leaves_after_the_same_time(
    journal: Journal,
) -> None:
    left = journal.arrivals[6]
    assert 0.05 <= left.leaves_s < 0.07
    patient = left._replace(time_s=0.0, output_len=40, max_new_tokens=60)
    record = simulate(WIDE, COST, [patient])
    assert record.state.tolist() == [ABORTED]
    assert 0 < record.output_len[0] < 40
    spread = simulate_cluster(WIDE, COST, [patient] * 2, num_replicas=2, method="round_robin")
    assert spread.state.tolist() == [ABORTED] * 2


def hand_driven() -> tuple[Records, RecordedEngine]:
    """Three requests of 50 tokens run, and have some."""
    records, engine = recorded_engine()
    for id in range(3):
        sampling = SamplingParams(max_new_tokens=50, seed=id, ignore_eos=True)
        prompt = np.arange(9 + id, dtype=np.int32).tobytes()
        engine.submit(GenerateRequest(id=id, rid=f"r{id}", input_ids=prompt, sampling=sampling))
    for _ in range(8):
        engine.step()
    return records, engine


def test_an_output_that_a_stop_string_ended_is_finished_and_one_that_was_left_is_aborted() -> None:
    records, engine = hand_driven()
    engine.submit(Abort(ids=(0,), output_lens=(5,), message="a stop string was found"))
    engine.submit(Abort(ids=(1,)))
    while engine.has_work:
        engine.step()
    journal = read_journal(records)
    again = simulate(SCENE, COST, journal.arrivals)
    for run in (journal.record, again):
        assert run.state.tolist() == [DONE, ABORTED, DONE]
        assert 0 < run.output_len[0] == run.output_len[1] < 50
    assert "2 finished, 1 aborted, 0 refused" in by_line(again)


def write(records: Records, folder: Path) -> Path:
    file = folder / "traffic.journal"
    writer = JournalWriter(file)
    for each in records:
        writer.append(each)
    writer.flush()
    writer.close()
    return file


def by_line(run: Any) -> str:
    return command.describe(summarize(run, Slo())).splitlines()[0]


def test_a_journal_without_requests_is_refused(tmp_path: Path) -> None:
    file = write(recorded_engine()[0], tmp_path)
    with pytest.raises(SettingsError, match=r"traffic\.journal has no requests; 1 or more"):
        command.sim(["--trace", str(file)])


def test_a_reply_that_was_lost_fails_its_request_and_no_other() -> None:
    records, engine = hand_driven()
    engine.lose((1,), "its reply could not be sent")
    while engine.has_work:
        engine.step()
    journal = read_journal(records)
    assert journal.record.state.tolist() == [DONE, REFUSED, DONE]
    assert summarize(journal.record, Slo()).refused_by == {FAILED: 1}
    assert [arrival.output_len for arrival in journal.arrivals] == [50, 50, 50]


@pytest.mark.parametrize(
    ("message", "status", "why"),
    [
        ("the grammar has no end", 400, INVALID),
        ("the adapter is not loaded any more", 404, INVALID),
        ("the memory of the device is released (kv_cache)", 503, FAILED),
        ("this request failed: ValueError", 500, FAILED),
    ],
)
def test_what_no_setting_changes_is_told_from_what_was_a_fault(
    message: str, status: int, why: str
) -> None:
    assert why_refused(Finish(id=1, reason="error", message=message, status=status)) == why


def test_tenants_have_their_ends_by_reason(journal: Journal) -> None:
    header, _, *rows = by_tenant(journal.record).splitlines()
    assert header.split()[:5] == ["tenant", "requests", "finished", "aborted", "refused"]
    assert all(reason in header for reason in ENDS)
    # not begun in time, not ended in time, queue full, too long, ttft_ms
    counts = {row.split()[0]: row.split()[1:10] for row in rows}
    assert counts["alice"] == ["7", "5", "0", "2", "0", "1", "0", "1", "0"]
    assert counts["bob"] == ["4", "0", "1", "3", "1", "0", "1", "0", "1"]


def test_the_command_says_for_each_run_what_became_of_the_requests(
    records: Records, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(records, tmp_path)
    figures = tmp_path / "figures.json"
    words = ["--trace", str(file), "--json", str(figures)]
    assert command.sim([*words, "--compare", "max_queued_requests=1,9"]) == 0
    shown = capsys.readouterr()
    lines = [line.split() for line in shown.out.splitlines()]
    counts = {line[0]: line[1:] for line in lines if len(line) == 10}
    assert counts["recorded"] == ["11", "5", "1", "5", "1", "1", "1", "1", "1"]
    assert counts["max_queued_requests=1"] == counts["recorded"]
    assert "6 requests without an end: the length of the output is guessed" in shown.err
    found = json.loads(figures.read_text())
    assert found["recorded"]["refused_by"] == ENDS
    assert found["runs"][0]["settings"]["max_queued_requests"] == 1
    assert "queue full" not in found["runs"][1]["figures"]["refused_by"]
