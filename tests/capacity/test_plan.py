"""The verb `plan` in virtual time: a machine from a file, so that nothing is measured."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import msgspec
import pytest

from tests.capacity.machines import MACHINE
from weft.cli.capacity.options import PlanOptions, WorkloadOptions
from weft.cli.capacity.plan import plan
from weft.cli.capacity.quality import NOT_STATED, stated_quality
from weft.cli.capacity.tune import TuneOptions
from weft.config.engine import EngineConfig
from weft.config.options import Command, Config, SettingsError
from weft.config.server import ServerConfig

LOAD = "--prompt 40 --output uniform:10:30 --messages 2 --think-s 1 --requests 12 --search-s 1"
LOAD += " --slo-ttft 0.15 --slo-itl 0.03"


def written(folder: Path) -> str:
    """The name of a file with the machine."""
    file = folder / "machine.json"
    file.write_bytes(msgspec.json.encode({"machine": msgspec.to_builtins(MACHINE)}))
    return str(file)


@pytest.fixture
def cost(tmp_path) -> str:
    return written(tmp_path)


def words(cost: str, *more: str) -> list[str]:
    return ["--cost", cost, *LOAD.split(), *more]


class Answered(NamedTuple):
    text: str
    figures: Path
    settings: Path
    picture: Path


@pytest.fixture(scope="module")
def answered(tmp_path_factory) -> Answered:
    """One plan with all of its files."""
    folder = tmp_path_factory.mktemp("plan")
    cost = written(folder)
    found = Answered("", folder / "answer.json", folder / "weft.toml", folder / "curve.svg")
    argv = words(cost, "--price-per-hour", "3", "--json", str(found.figures))
    argv += ["--toml", str(found.settings), "--plot", str(found.picture)]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert plan(argv) == 0
    return found._replace(text=text.getvalue())


def test_the_answer_has_a_curve_a_knee_a_limit_and_settings(answered: Answered) -> None:
    for word in ("< knee", "limit ", "memory ", "price ", "weft serve weft-nano --threads=1"):
        assert word in answered.text
    ElementTree.parse(answered.picture)


def test_the_answer_in_json_is_a_machine_for_another_plan(answered: Answered, capsys) -> None:
    found = json.loads(answered.figures.read_text())
    assert 1 <= found["knee_range"]["low"] <= found["knee"] <= found["knee_range"]["high"]
    assert plan(words(str(answered.figures), "--json", "-")) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["knee"] == found["knee"]
    assert again["per_million"] == 0


def test_the_file_of_settings_is_one_for_serve(answered: Answered) -> None:
    assert tomllib.loads(answered.settings.read_text())["model"] == "weft-nano"
    command = Command("weft serve", "", EngineConfig, ServerConfig, positional="model")
    read = command.read(["--config", str(answered.settings)], {})
    assert read.make(EngineConfig).model == "weft-nano"
    assert read.make(ServerConfig).knee_output_per_s > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--compare", "quantize"], "--compare has 'quantize'"),
        (["--compare", "quantise=int8"], "did you mean quantize"),
        (["--compare", "quantize=none,int8"], "leave out --cost"),
        (["--prompt", "long"], "--prompt is 'long'"),
        (["--prompt", "5000"], "not one request of this traffic can be served: 1,024 tokens"),
        (["--max-running-requests", "0"], "max_running_requests is 0"),
        (["--users", "1000000"], "0 to 4,096 is expected"),
        (["--plot", "curve.txt"], "ends in .svg"),
        (["--trace", "nowhere.journal"], "cannot read the trace"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(cost, argv, message) -> None:
    with pytest.raises(SettingsError, match=message):
        plan(words(cost, *argv))


def test_a_trace_without_limits_fits_a_short_context(cost, tmp_path, capsys) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("Timestamp,Model,Request tokens,Response tokens\n9,a,40,8\n5,a,30,4\n")
    assert plan(words(cost, "--trace", str(trace), "--slo-ttft", "0", "--slo-itl", "0")) == 0
    assert "x the recorded rate (" in capsys.readouterr().out


def test_a_wrong_trace_is_refused_before_the_machine_is_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("weft.cli.capacity.plan.measure", None)
    trace = tmp_path / "trace.csv"
    trace.write_text("Timestamp,Model,Request tokens,Response tokens\n9,a,forty,8\n")
    with pytest.raises(SettingsError, match="line 2"):
        plan(["--trace", str(trace)])


def test_an_option_that_is_given_is_not_compared() -> None:
    with pytest.raises(SettingsError, match="which is set to 'int8'"):
        plan(["--quantize", "int8", "--compare", "quantize=none,int8"])


def test_quality_is_stated_for_what_may_change_answers() -> None:
    assert list(stated_quality({"quantize": "none", "kv_dtype": "bf16"})) == []
    (line,) = stated_quality({"quantize": "int8"})
    assert "perplexity" in line
    (line,) = stated_quality({"kv_dtype": "fp8"})
    assert NOT_STATED in line


def examples() -> list[list[str]]:
    """The commands of the guide, as words."""
    page = Path(__file__).parents[2] / "docs" / "guides" / "plan.md"
    blocks = re.findall(r"^```\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("argv", examples(), ids=" ".join)
def test_commands_of_the_guide_are_read(argv: list[str]) -> None:
    configs: dict[str, tuple[type[Config], ...]] = {
        "plan": (WorkloadOptions, PlanOptions, EngineConfig),
        "tune": (TuneOptions, WorkloadOptions),
        "serve": (EngineConfig, ServerConfig),
    }
    weft, verb, *more = argv
    assert weft == "weft"
    positional = "" if verb == "tune" else "model"
    read = Command(f"weft {verb}", "", *configs[verb], positional=positional).read(more, {})
    for config in configs[verb]:
        read.make(config)


def test_the_example_with_several_machines_runs(cost, capsys) -> None:
    (argv,) = [argv for argv in examples() if "--machines" in argv]
    more = [cost if word.endswith(".json") else word for word in argv[2:]]
    assert plan([*more, "--requests", "8", "--search-s", "1", "--slo-ttft", "0.6"]) == 0
    text = capsys.readouterr().out
    assert "cache_aware" in text
    assert "for a million output tokens" in text
