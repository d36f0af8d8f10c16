from __future__ import annotations

from weft.scheduler.service.journal import RecordedEngine
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import Cost, CostRunner, TrueLengths, VirtualClock
from weft.sim.journal import read_journal
from weft.sim.run import DONE, Run, simulate
from weft.sim.synthetic import Traffic, synthetic
from weft.sim.trace import EOS, TokenSource

SETTINGS = SchedulerSettings(
    num_pages=200,
    page_size=16,
    max_running_requests=8,
    context_length=512,
    vocab_size=1_000,
    eos_token_ids=(EOS,),
    chunked_prefill_size=64,
)
COST = Cost(0.01, 1e-4, 1e-6)
TRAFFIC = Traffic(requests=30, rate=20.0, input_len="uniform:20:450", output_len="uniform:1:150", max_tokens=120)


class Records(list[bytes]):
    """A journal in memory."""

    num_bytes = 0

    def flush(self) -> None:
        pass

    def rotate(self) -> None:
        pass


def record(clock_s: float = 0.0) -> Records:
    """The journal of an engine that serves TRAFFIC, on a clock that says `clock_s` when it begins."""
    records, clock, lengths = Records(), VirtualClock(), TrueLengths()
    clock.wait_until(clock_s)
    engine = RecordedEngine(
        SETTINGS,
        CostRunner(COST, clock, lengths),
        clock=clock,
        overlap=1,
        on_failure=lambda exc: None,
        sink=records,
        max_bytes=1 << 30,
    )
    engine.begin()
    Run(engine, clock, TokenSource(SETTINGS.vocab_size), lengths).play(synthetic(TRAFFIC))
    return records


def test_journal_gives_the_requests_that_were_served() -> None:
    journal = read_journal(record())
    tokens, sent = TokenSource(SETTINGS.vocab_size), list(synthetic(TRAFFIC))
    fitting = [arrival for arrival in sent if arrival.prompt_len + arrival.max_new_tokens <= SETTINGS.context_length]
    assert 0 < journal.num_left_out == len(sent) - len(fitting)
    assert journal.settings == SETTINGS
    assert [arrival.prompt for arrival in journal.arrivals] == [tokens.pack(arrival.prompt) for arrival in fitting]
    assert [arrival.output_len for arrival in journal.arrivals] == [arrival.output_len for arrival in fitting]
    assert {arrival.tenant for arrival in journal.arrivals} == {"tenant-0"}
    times = [arrival.time_s for arrival in journal.arrivals]
    assert times == sorted(times)


def test_times_count_from_the_first_arrival_whatever_the_clock_said() -> None:
    late = read_journal(record(clock_s=10_000.0)).arrivals
    assert late[0].time_s < 1.0
    assert late[-1].time_s < 60.0


def test_journal_can_be_simulated_with_other_settings() -> None:
    journal = read_journal(record())
    result = simulate(journal.settings, COST, journal.arrivals)
    assert (result.state == DONE).all()
    assert result.output_len.tolist() == [arrival.output_len for arrival in journal.arrivals]


def test_requests_that_had_not_ended_are_left_out() -> None:
    records = record()
    whole, cut = read_journal(records), read_journal(records[: len(records) // 2])
    assert 0 < len(cut.arrivals) < len(whole.arrivals)
    assert cut.num_left_out > whole.num_left_out
    assert all(arrival in whole.arrivals for arrival in cut.arrivals)
