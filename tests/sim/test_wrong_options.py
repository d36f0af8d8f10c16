"""What `weft sim` says about options that cannot be used."""

from __future__ import annotations

import pytest

from weft.cli.main import main
from weft.cli.sim import DEFAULTS, engine_options
from weft.config.options import options_of


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--requests", "0"], "--requests is 0; at least 1 is expected"),
        (["--page-size", "0"], "--page-size is 0; 1 to 1,024 is expected"),
        (["--compare", "page_size=0"], "--compare page_size is 0; 1 to 1,024 is expected"),
        (["--num-pages", "-1"], "--num-pages is -1; at least 1 is expected"),
        (["--max-running-requests", "0"], "--max-running-requests is 0; at least 1 is expected"),
        (["--max-draft", "100"], "--max-draft is 100; 1 to 64 is expected"),
        (["--router", "nope"], "--router: there is no router 'nope'"),
        (["--policy", "nope"], "--policy is 'nope'; there is no such policy"),
        (["--fit", "/nowhere/x"], "--fit: cannot read /nowhere/x: No such file or directory"),
        (["--fit", "/dev/null"], "cannot fit the cost: /dev/null has no lines with steps"),
        (["--trace", "/dev"], "cannot read the trace /dev: Is a directory\n"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["sim", *arguments]) != 0
    assert told in capsys.readouterr().err


def test_the_policy_has_the_name_that_it_has_in_serve(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["sim", "--requests", "2", "--policy", "lpm"]
    assert main([*short, "--compare", "policy=fcfs,lpm"]) == 0
    told = capsys.readouterr().out
    served = ["sim", "--requests", "2", "--schedule-policy", "lpm"]
    assert main([*served, "--compare", "schedule_policy=fcfs,lpm"]) == 0
    assert capsys.readouterr().out == told


def test_each_setting_of_the_engine_says_more_than_its_name() -> None:
    for each in options_of(engine_options(DEFAULTS)):
        assert each.help != each.name.replace("_", " ")
