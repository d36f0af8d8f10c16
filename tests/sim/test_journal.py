from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.records import COST, TRAFFIC, Records, record, recorded_engine
from tests.sim.scene import SCENE
from weft.journal.recorder import RecordedEngine
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.pace.step_cost import StepLoad
from weft.sim.cost import CostRunner, TrueLengths, VirtualClock
from weft.sim.fit import StepTime, fit
from weft.sim.journal import read_journal
from weft.sim.outcome import ABORTED, DONE
from weft.sim.report import Slo, by_tenant, summarize
from weft.sim.run import simulate
from weft.sim.synthetic import synthetic
from weft.sim.trace import Arrival, Segment, TokenSource


def test_journal_gives_the_requests_that_were_served() -> None:
    journal = read_journal(record())
    tokens = TokenSource(SCENE.vocab_size)
    sent = list(synthetic(TRAFFIC))
    assert journal.num_open == journal.num_invalid == 0
    assert journal.settings == SCENE
    assert [arrival.prompt for arrival in journal.arrivals] == [
        tokens.pack(arrival.prompt) for arrival in sent
    ]
    fits = journal.record.state == DONE
    assert 0 < journal.num_guessed == (~fits).sum()
    for arrival, was, done in zip(journal.arrivals, sent, fits, strict=True):
        assert done == (was.prompt_len + was.max_new_tokens <= SCENE.context_length)
        assert arrival.output_len == was.output_len or not done
    assert {arrival.tenant for arrival in journal.arrivals} == {"tenant-0"}
    times = [arrival.time_s for arrival in journal.arrivals]
    assert times == sorted(times)


@pytest.mark.parametrize("overlap", [0, 1])
def test_outputs_are_as_recorded_so_that_guesses_are_right_where_they_were(overlap: int) -> None:
    guessing = replace(SCENE, speculative="ngram")
    sent = []
    for number in range(8):
        # Each output repeats itself here and there, each one elsewhere.
        tokens = np.random.default_rng(number).integers(2, 6, 60, dtype=np.int32)
        prompt = np.arange(2 + number, 30 + number, dtype=np.int32).tobytes()
        arrival = Arrival(0.05 * number, prompt, 60, 60, ignore_eos=True, output=tokens.tobytes())
        sent.append(arrival)
    journal = read_journal(record(arrivals=sent, settings=guessing, overlap=overlap))
    known = [one.output[:-4] for one in journal.arrivals]  # the last one is that which ended it
    assert known == [one.output[:-4] for one in sent]
    again = simulate(guessing, COST, journal.arrivals, overlap=overlap > 0)
    fillers = [one._replace(output=b"") for one in journal.arrivals]
    upper_bound = simulate(guessing, COST, fillers, overlap=overlap > 0)
    assert again.machine.meter.num_steps == len(journal.steps)
    assert again.end_s.tolist() == pytest.approx(journal.record.end_s.tolist())
    assert upper_bound.machine.meter.num_steps < len(journal.steps)


def test_a_request_for_no_token_asks_for_none_again() -> None:
    [arrival] = read_journal(record(arrivals=[Arrival(0.0, (Segment(0, 20),), 0, 0)])).arrivals
    assert arrival.output_len == 0
    assert arrival.max_new_tokens == 0


def test_members_of_a_batch_are_arrivals_of_their_own() -> None:
    records = Records()
    clock = VirtualClock()
    lengths = TrueLengths()
    engine = RecordedEngine(
        replace(SCENE, eos_token_ids=()),
        CostRunner(COST, clock, lengths),
        clock=clock,
        overlap=0,
        on_failure=lambda exc: None,
        sink=records,
        max_bytes=1 << 30,
    )
    engine.start_over()
    prompts = [np.arange(n, dtype=np.int32).tobytes() for n in (3, 5)]
    sampling = [SamplingParams(max_new_tokens=2, seed=id) for id in range(3)]
    members = [
        GenerateRequest(id=id, rid=f"r{id}", sampling=sampling[id], tenant=f"u{id}")
        for id in range(3)
    ]
    for id, place in enumerate((0, 1, 1)):
        lengths.add(id, len(prompts[place]) // 4 + 2)
    engine.submit(BatchGenerate(prompts=prompts, requests=members, prompt_of=[0, 1, 1]))
    while engine.has_work:
        engine.step()
    arrivals = read_journal(records).arrivals
    assert [(one.tenant, one.prompt) for one in arrivals] == [
        (f"u{id}", prompts[id > 0]) for id in range(3)
    ]


def test_times_count_from_the_first_arrival_whatever_the_clock_said() -> None:
    late = read_journal(record(clock_s=10_000.0)).arrivals
    assert late[0].time_s < 1.0
    assert late[-1].time_s < 60.0


def test_journal_can_be_simulated_with_other_settings() -> None:
    journal = read_journal(record())
    larger = replace(journal.settings, context_length=1_024)
    result = simulate(larger, COST, journal.arrivals)
    assert (result.state == DONE).all()
    assert result.output_len.tolist() == [arrival.output_len for arrival in journal.arrivals]


def test_requests_that_had_not_ended_are_left_out() -> None:
    records = record()
    whole = read_journal(records)
    cut = read_journal(records[: len(records) // 2])
    assert 0 < len(cut.arrivals) < len(whole.arrivals)
    assert cut.num_open > whole.num_open == 0
    prompts = [arrival.prompt for arrival in whole.arrivals]
    assert all(arrival.prompt in prompts for arrival in cut.arrivals)


def test_the_cost_of_a_step_follows_from_the_journal_alone() -> None:
    journal = read_journal(record())
    assert journal.overlaps
    fitted = fit(journal.steps).cost
    for loaded in (StepTime(1, 100, 1, 0.0), StepTime(64, 300, 0, 0.0), StepTime(8, 2_000, 8, 0.0)):
        load = StepLoad(loaded.num_tokens, 0, loaded.context, loaded.num_samples)
        assert fitted.seconds(load) == pytest.approx(COST.seconds(load), rel=0.02)


def test_a_simulation_of_a_journal_by_itself_comes_out_as_it_was_recorded() -> None:
    fitting = [a for a in synthetic(TRAFFIC) if a.prompt_len + a.max_new_tokens <= 512]
    journal = read_journal(record(arrivals=fitting))
    recorded = summarize(journal.record, Slo())
    again = simulate(journal.settings, fit(journal.steps).cost, journal.arrivals)
    simulated = summarize(again, Slo())
    assert simulated.output_per_s == pytest.approx(recorded.output_per_s, rel=0.02)
    assert simulated.itl_s[0] == pytest.approx(recorded.itl_s[0], rel=0.05)
    assert simulated.e2e_s[0] == pytest.approx(recorded.e2e_s[0], rel=0.05)
    assert simulated.ttft_s[0] == pytest.approx(recorded.ttft_s[0], rel=0.1)


def test_a_request_that_was_aborted_ends_where_its_client_left_it() -> None:
    records, engine = recorded_engine()
    for id in range(2):
        sampling = SamplingParams(max_new_tokens=50, seed=id, ignore_eos=True)
        prompt = np.arange(9, dtype=np.int32).tobytes()
        engine.submit(
            GenerateRequest(
                id=id, rid=f"r{id}", input_ids=prompt, sampling=sampling, tenant=f"u{id}"
            )
        )
    for _ in range(8):
        engine.step()
    engine.submit(Abort(ids=(0,)))
    while engine.has_work:
        engine.step()
    journal = read_journal(records)
    assert journal.record.state.tolist() == [ABORTED, DONE]
    left, whole = journal.arrivals
    assert 0 < left.output_len < whole.output_len == 50
    table = by_tenant(simulate(SCENE, COST, journal.arrivals))
    assert [line.split()[0] for line in table.splitlines()[-2:]] == ["u1", "u0"]
