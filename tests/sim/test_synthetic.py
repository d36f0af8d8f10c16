from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft.config.options import SettingsError
from weft.sim.synthetic import Lengths, Traffic, synthetic
from weft.sim.trace import OUTPUT, Arrival, Prompt, TokenSource

MANY = Traffic(requests=3_000, rate=10.0, input_len="uniform:10:20", output_len="5")


def segments(arrival: Arrival) -> Prompt:
    assert not isinstance(arrival.prompt, bytes)
    return arrival.prompt


def test_the_seed_decides_everything() -> None:
    first = list(synthetic(MANY))
    again = list(synthetic(MANY))
    other = list(synthetic(replace(MANY, traffic_seed=1)))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("arrivals", "variation"),
    [("constant", (0.0, 0.01)), ("poisson", (0.9, 1.1)), ("burst", (2.5, 4.0))],
)
def test_gaps_have_the_rate_and_the_variation_of_their_process(
    arrivals: str, variation: tuple[float, float]
) -> None:
    gaps = np.diff([arrival.time_s for arrival in synthetic(replace(MANY, arrivals=arrivals))])
    assert gaps.mean() == pytest.approx(0.1, rel=0.2)
    assert variation[0] <= gaps.std() / gaps.mean() <= variation[1]


def test_rate_zero_lets_all_come_at_once() -> None:
    assert {arrival.time_s for arrival in synthetic(replace(MANY, rate=0.0))} == {0.0}


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("7", 7, 7, 7),
        ("uniform:10:30", 10, 30, 20),
        ("lognormal:100", 1, 10_000, 100),
        ("lognormal:50:0.2", 20, 120, 50),
    ],
)
def test_lengths_follow_their_distribution(text: str, low: int, high: int, mean: int) -> None:
    drawn = Lengths.parse(text, "--input-len").draw(np.random.default_rng(0), 20_000)
    assert low <= min(drawn) <= max(drawn) <= high
    assert np.mean(drawn) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "0", "1e12", "nan", "uniform:3", "uniform:9:3", "uniform:1:inf", "normal:3"),
        *("lognormal", "lognormal:1:2:3", "lognormal:1:nan", "lognormal:1:99"),
    ],
)
def test_unreadable_length_names_its_option(text: str) -> None:
    with pytest.raises(SettingsError, match="--output-len"):
        Lengths.parse(text, "--output-len")


def test_prefixes_are_shared_by_zipfs_law() -> None:
    arrivals = list(synthetic(replace(MANY, prefixes=10, prefix_len=64, zipf=1.0)))
    assert all(segments(arrival)[0].length == 64 for arrival in arrivals)
    counts = np.bincount([segments(arrival)[0].key for arrival in arrivals])
    assert len(counts) == 10
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.25)


def test_next_turn_contains_the_previous_one_and_its_answer() -> None:
    arrivals = list(synthetic(replace(MANY, requests=500, turns=4)))
    assert len(arrivals) == 500
    later = [(number, arrival) for number, arrival in enumerate(arrivals) if arrival.after >= 0]
    assert later
    tokens = TokenSource(1_000)
    for number, arrival in later:
        before = arrivals[arrival.after]
        assert arrival.after < number
        assert segments(arrival)[: len(before.prompt) + 1] == (
            *segments(before),
            (OUTPUT, before.output_len),
        )
        assert tokens.pack(arrival.prompt).startswith(tokens.pack(before.prompt))
        assert arrival.tenant == before.tenant


def test_output_is_no_longer_than_the_scheduler_is_reported() -> None:
    arrivals = list(synthetic(replace(MANY, output_len="lognormal:100", max_tokens=50)))
    assert max(arrival.output_len for arrival in arrivals) == 50
    assert {arrival.max_new_tokens for arrival in arrivals} == {50}


def test_traces_with_other_first_keys_share_nothing() -> None:
    traffic = replace(MANY, requests=50, prefixes=3)
    keys = [
        {s.key for a in synthetic(traffic, first_key=key) for s in segments(a)}
        for key in (0, 1_000)
    ]
    assert not keys[0] & keys[1]
