"""Several engines in virtual time: one behaves as without a router, and many lose no request."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from weft.cli import sim as command
from weft.config.options import SettingsError
from weft.route.policy import METHODS
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cluster import simulate_cluster
from weft.sim.cost import PRESETS
from weft.sim.outcome import DONE
from weft.sim.run import Record, simulate
from weft.sim.synthetic import Traffic, synthetic
from weft.sim.trace import EOS, VOCAB_SIZE

SETTINGS = SchedulerSettings(
    num_pages=400,
    page_size=16,
    max_running_requests=8,
    context_length=2_048,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(EOS,),
    chunked_prefill_size=256,
)
TRAFFIC = Traffic(
    requests=60,
    rate=20.0,
    prefixes=8,
    prefix_len=200,
    turns=3,
    think=1.0,
    input_len="uniform:20:80",
    output_len="uniform:5:30",
    max_tokens=64,
)
COST = PRESETS["gpu"]


def played(
    num_replicas: int,
    method: str = "cache_aware",
    *,
    overlap: bool = True,
    traffic: Traffic = TRAFFIC,
) -> Record:
    return simulate_cluster(
        SETTINGS,
        COST,
        synthetic(traffic),
        num_replicas=num_replicas,
        method=method,
        overlap=overlap,
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_one_replica_is_the_simulation_of_one_engine_bit_for_bit(overlap: bool) -> None:
    alone = simulate(SETTINGS, COST, synthetic(TRAFFIC), overlap=overlap)
    routed = played(1, overlap=overlap)
    for name in ("sent_s", "first_s", "end_s", "prompt_len", "output_len", "cached_len", "state"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(routed, name), err_msg=name)
    assert vars(alone.machine.meter) == vars(routed.machine.meter)
    assert routed.machine.busiest == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_every_request_ends_whatever_chooses_the_engine(method: str) -> None:
    record = played(3, method)
    assert (record.state == DONE).all()
    assert (record.first_s >= record.sent_s).all()
    assert (record.output_len > 0).all()


def test_the_same_trace_gives_the_same_run() -> None:
    one = played(3)
    other = played(3)
    np.testing.assert_array_equal(one.end_s, other.end_s)


def test_choosing_by_caches_finds_more_prompts_than_taking_turns() -> None:
    by_caches = played(4, "cache_aware").cached_len.sum()
    in_turn = played(4, "round_robin").cached_len.sum()
    assert by_caches > 1.3 * in_turn


def test_the_command_compares_routers(tmp_path, capsys) -> None:
    file = tmp_path / "runs.json"
    words = "--replicas 2 --requests 20 --rate 50 --num-pages 2000 --context-length 4096 --max-running-requests 8"
    routers = ["--router", "round_robin,cache_aware", "--json", str(file)]
    assert command.sim([*words.split(), *routers]) == 0
    assert "router=cache_aware" in capsys.readouterr().out
    runs = json.loads(file.read_text())["runs"]
    assert [run["router"] for run in runs] == ["round_robin", "cache_aware"]
    assert all(run["figures"]["busiest"] >= 1.0 for run in runs)


def test_an_unknown_router_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"'cash_aware'.*cache_aware"):
        command.sim(["--replicas", "2", "--router", "cash_aware"])


def test_two_caches_find_nearly_what_one_of_both_sizes_does() -> None:
    traffic = replace(TRAFFIC, requests=250, rate=12.0, prefixes=24)
    half = played(2, traffic=traffic)
    whole = simulate_cluster(
        replace(SETTINGS, num_pages=800, max_running_requests=16),
        COST,
        synthetic(traffic),
        num_replicas=1,
        method="cache_aware",
        overlap=True,
    )
    assert half.cached_len.sum() >= 0.95 * whole.cached_len.sum()
