"""The line that a server writes about itself while its engine has work."""

from __future__ import annotations

import io

from weft.observe.engine_numbers import EngineNumbers

IDLE = {
    **dict.fromkeys(("num_running", "num_waiting", "kv_used", "busy_s", "total_retractions"), 0),
    **dict.fromkeys(("total_prompt_tokens", "total_cached_tokens", "total_generated_tokens"), 0),
    "kv_tokens": 1_000,
}


def test_one_line_in_ten_seconds_while_there_is_work_and_none_without(lines: io.StringIO) -> None:
    engine = EngineNumbers("m")
    for second in range(100):  # one snapshot a second; work from second 20 to 55
        work = {
            "num_running": 2,
            "busy_s": second - 20,
            "total_generated_tokens": 50 * (second - 20),
        }
        engine.set(IDLE | work if 20 <= second < 55 else IDLE | {"busy_s": 35}, float(second))
    written = lines.getvalue().splitlines()
    assert len(written) == 4  # at 20, 30, 40, 50
    assert all("running=2" in line for line in written)
    assert "output_tokens_per_s=50" in written[-1]


def test_line_tells_what_runs_how_fast_and_how_full(lines: io.StringIO) -> None:
    engine = EngineNumbers("m")
    engine.set(
        IDLE
        | {"num_running": 3, "num_waiting": 4, "kv_used": 250, "busy_s": 2.0, "policy_fault": "x"}
        | {"total_prompt_tokens": 200, "total_cached_tokens": 50, "total_generated_tokens": 30},
        0.0,
    )
    [line] = lines.getvalue().splitlines()
    assert (
        " info status working model=m running=3 waiting=4 prompt_tokens_per_s=100 "
        "output_tokens_per_s=15 " in line
    )
    assert line.endswith(" kv_used=25.0% cache_hits=25.0% retractions=0")


def test_line_is_written_though_the_snapshot_has_words(lines: io.StringIO) -> None:
    engine = EngineNumbers("m")
    engine.set(IDLE | {"num_running": 1, "policy_fault": "it has raised"}, 0.0)  # type: ignore[dict-item]
    assert "running=1" in lines.getvalue()


def test_line_has_nothing_below_none_when_an_engine_is_lost_with_its_counts(
    lines: io.StringIO,
) -> None:
    engine = EngineNumbers("m")
    both = {"total_prompt_tokens": 200, "total_cached_tokens": 50, "total_generated_tokens": 30}
    engine.set(IDLE | {"num_running": 2, "busy_s": 2.0} | both, 0.0)
    engine.set(IDLE | {"num_running": 1, "busy_s": 1.0}, 20.0)
    [_, line] = lines.getvalue().splitlines()
    assert " prompt_tokens_per_s=0 output_tokens_per_s=0 " in line
    assert " cache_hits=0.0% " in line
