"""The verbs `sim` and `bench`, from the command line to the files that they write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import batching, grammar, shape
from weft.bench import prediction, scheduler, workloads
from weft.cli.bench import bench
from weft.cli.sim import sim
from weft.config.options import SettingsError

TRAFFIC = [
    "--requests",
    "40",
    "--rate",
    "20",
    "--input-len",
    "uniform:20:60",
    "--output-len",
    "uniform:2:20",
]
SMALL_ENGINE = ["--threads", "1", "--kv-tokens", "4096", "--max-running-requests", "8"]


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def test_sim_prints_figures_of_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim([*TRAFFIC, "--slo-ttft", "10", "--cost", "0.01,0.0001,0.000001"]) == 0
    assert "goodput" in capsys.readouterr().out


def test_sim_compares_all_combinations_of_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    compare = "policy=fcfs,lpm mixed_chunk=on,off"
    assert sim([*TRAFFIC, "--compare", compare, "--json", str(path), "--num-pages", "500"]) == 0
    runs = load(path)["runs"]
    assert [run["name"] for run in runs] == [
        f"policy={policy} mixed_chunk={mixed}"
        for policy in ("fcfs", "lpm")
        for mixed in ("on", "off")
    ]
    assert runs[0]["settings"]["num_pages"] == 500
    assert runs[3]["settings"]["mixed_chunk"] is False
    assert (
        "policy=lpm mixed_chunk=off against policy=fcfs mixed_chunk=on" in capsys.readouterr().out
    )


def test_sim_plays_a_trace_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    path = tmp_path / "out.json"
    request = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
    trace.write_text(
        "".join(json.dumps(request | {"timestamp": 10_000 * i}) + "\n" for i in range(5))
    )
    assert sim(["--trace", str(trace), "--requests", "4", "--json", str(path)]) == 0
    figures = load(path)["runs"][0]["figures"]
    assert figures["requests"] == 4
    assert figures["refused"] == 0
    assert figures["hit_rate"] == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "lmp"], "did you mean lpm"),
        (["--compare", "polcy=fcfs"], "did you mean policy"),
        (["--compare", "policy=fcfs,foo"], "'foo'; there is no such policy"),
        (["--cost", "gpus"], "did you mean gpu"),
        (["--cost", "1,2"], "a,b,c"),
        (["--chunked-prefill-size", "8"], "at least page_size"),
        (["--fit", "/nowhere.csv"], "cannot read /nowhere.csv: No such file"),
        (["--input-len", "many"], "--input-len"),
        (["--json", "/nowhere/x.json"], "there is no folder /nowhere"),
    ],
)
def test_sim_says_what_is_wrong_with_a_setting(words: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        sim(["--requests", "2", *words])


def test_plot_without_matplotlib_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SettingsError, match="pip install"):
        sim(["--requests", "2", "--plot", str(tmp_path / "x.png")])


def test_bench_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench([]) == 0
    assert "scheduler" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="did you mean offline"):
        bench(["ofline"])


def test_bench_scheduler_writes_figures_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = scheduler.OverheadFigure("decode step", "ms", 0.1, 0.09, 0.2, 0.15)
    monkeypatch.setattr(scheduler, "measure", lambda **kind: [figure])
    path = tmp_path / "out.json"
    assert bench(["scheduler", "--json", str(path)]) == 0
    document = load(path)
    assert document["results"] == [figure._asdict() | {"is_met": True}]
    assert document["machine"]["cpus"] >= 1


def test_batching_shows_that_static_batching_leaves_rows_idle(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ["--simulate", "--scale", "0.1", "--cost", "0.01,0,0", "--mixed-chunk"]
    assert batching.main([*words, "--json", str(path)]) == 0
    uniform, mixed, high = load(path)["results"]
    assert uniform["ratio"] == pytest.approx(1.0, abs=0.02)
    for scene in (mixed, high):
        assert scene["static"]["row_use"] < 0.65 < 0.8 < scene["continuous"]["row_use"]
        assert scene["ratio"] > 1.5


def test_bench_offline_measures_the_bundled_model_and_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    steps = tmp_path / "steps.csv"
    words = ["--streams", "1,2", "--input-len", "20", "--output-len", "3", "--repeats", "1"]
    assert (
        bench(["offline", *SMALL_ENGINE, *words, "--json", str(path), "--trace", str(steps)]) == 0
    )
    one, two = load(path)["results"]
    assert one["load"]["num_streams"] == 1
    assert two["load"]["num_streams"] == 2
    assert min(one["output_per_s"], two["output_per_s"], one["ttft_s"], one["itl_s"]) > 0
    assert steps.read_text().startswith(
        "num_tokens,context,num_samples,seconds,num_pairs\n20,20,1,"
    )
    assert sim(["--fit", str(steps)]) == 0


def test_grammar_compares_free_masked_and_jumping_runs(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ["--streams", "2", "--input-len", "8", "--output-len", "24", "--repeats", "1"]
    assert grammar.main([*SMALL_ENGINE, *words, "--json", str(path)]) == 0
    free, masks, jumps = load(path)["results"]
    assert [one["kind"] for one in (free, masks, jumps)] == ["free", "masks", "masks, jumps"]
    assert free["steps"] == masks["steps"] == 24 > jumps["steps"]
    assert free["grammar_us"] == free["masks_us"] == 0
    assert min(masks["grammar_us"], masks["masks_us"], masks["of_free"], jumps["of_free"]) > 0


def test_bench_offline_takes_a_folder_with_nothing_but_a_shape(tmp_path: Path) -> None:
    from weft.weights.known import BUNDLED

    (tmp_path / "config.json").write_text((BUNDLED / "config.json").read_text())
    words = [
        "--load-format",
        "dummy",
        "--streams",
        "1",
        "--input-len",
        "4",
        "--output-len",
        "2",
        "--repeats",
        "1",
    ]
    assert bench(["offline", str(tmp_path), *SMALL_ENGINE, *words]) == 0


def test_bench_offline_says_when_requests_do_not_fit() -> None:
    with pytest.raises(SettingsError, match="may have"):
        bench(["offline", *SMALL_ENGINE, "--streams", "1", "--input-len", "3000", "--repeats", "1"])


def test_bench_offline_runs_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model of random weights that `benchmarks/shape.py` wrote; the prefix that all share is
    found in the cache."""
    monkeypatch.setitem(
        workloads.SHAPES, "tiny", {**workloads.SHAPES["tiny"], "num_hidden_layers": 1}
    )
    small = workloads.Workload("", [workloads.RequestShape(64, 8, 3)] * 4)
    monkeypatch.setitem(workloads.WORKLOADS, "w3", small)
    folder = tmp_path / "model"
    path = tmp_path / "out.json"
    assert shape.main(["tiny", "--folder", str(folder)]) == 0
    words = [
        "offline",
        str(folder),
        "--workload",
        "w3",
        "--repeats",
        "1",
        "--json",
        str(path),
        *SMALL_ENGINE,
    ]
    assert bench([*words, "--context-length", "256"]) == 0
    (result,) = load(path)["results"]
    assert result["workload"] == "w3"
    assert result["total_per_s"] == pytest.approx(result["output_per_s"] * (4 * 72 + 12) / 12)
    with pytest.raises(SettingsError, match="no workload 'w9'; there are w1"):
        bench(["offline", str(folder), "--workload", "w9"])


def test_bench_prediction_without_requests_is_refused() -> None:
    with pytest.raises(SettingsError, match="--requests is 0; at least 1 is expected"):
        bench(["prediction", "--requests", "0"])


def test_bench_prediction_compares_a_real_run_with_its_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "CALIBRATION", [[(20, 3)], [(30, 4)] * 3])
    path = tmp_path / "out.json"
    words = [
        "--requests",
        "5",
        "--rate",
        "0",
        "--input-len",
        "20",
        "--output-len",
        "3",
        "--json",
        str(path),
    ]
    assert bench(["prediction", *SMALL_ENGINE, *words]) == 0
    figures = {each["figure"]: each for each in load(path)["results"]}
    throughput = figures["output tokens/s"]
    assert min(throughput["measured"], throughput["predicted_with_own_cost"]) > 0
