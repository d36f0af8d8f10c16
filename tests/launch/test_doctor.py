"""What the doctor finds in good and bad model folders, without loading one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.launch.tiny_model import write_safetensors, write_tiny_model
from tests.models.many import make_checkpoint
from tests.models.pooled import make_pooled
from weft.assemble import model_folder, prepare
from weft.cli import doctor
from weft.cli import main as cli
from weft.config.engine import EngineConfig
from weft.config.machine import GpuCard, Machine

SHAPES = {
    "model.embed_tokens.weight": [258, 16],
    "model.norm.weight": [16],
    "model.layers.0.input_layernorm.weight": [16],
    "model.layers.0.post_attention_layernorm.weight": [16],
    "model.layers.0.self_attn.q_proj.weight": [16, 16],
    "model.layers.0.self_attn.k_proj.weight": [8, 16],
    "model.layers.0.self_attn.v_proj.weight": [8, 16],
    "model.layers.0.self_attn.o_proj.weight": [16, 16],
    "model.layers.0.mlp.gate_proj.weight": [32, 16],
    "model.layers.0.mlp.up_proj.weight": [32, 16],
    "model.layers.0.mlp.down_proj.weight": [16, 32],
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_tiny_model(tmp_path / "tiny")
    write_safetensors(folder / "model.safetensors", SHAPES)
    return folder


def examine(
    capsys: pytest.CaptureFixture[str], *argv: str
) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit status, and mark and text of each check by its name."""
    status = cli.main(["doctor", *argv])
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    return status, {
        words[1]: (words[0], words[2]) for words in lines if words[0] in ("ok", "warn", "FAIL")
    }


def test_good_model_on_this_machine(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    status, found = examine(capsys, str(model), "--port", "0")
    assert status == 0, found
    assert {
        "cpu",
        "memory",
        "torch",
        "packages",
        "model",
        "weights",
        "tokenizer",
        "chat",
        "fit",
    } <= found.keys()
    assert found["weights"][1].startswith("11 tensors")


def test_that_the_default_model_is_missing_is_said_once(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEFT_DEFAULT_MODEL", str(model))
    monkeypatch.setattr(model_folder, "missing_default", lambda: "it is missing")
    assert examine(capsys, "--port", "0")[0] == 0
    assert caplog.text.count("it is missing") == 1


def test_missing_folder_ends_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examine(capsys, "/nowhere", "--port", "0")
    assert status == 1
    assert found["model"] == ("FAIL", "there is no folder /nowhere")
    assert "weights" not in found


def test_missing_tensor_is_named(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if "up_proj" not in name}
    write_safetensors(model / "model.safetensors", shapes)
    status, found = examine(capsys, str(model), "--port", "0")
    assert status == 1
    wrong = "they are not what config.json says (1 missing: model.layers.0.mlp.up_proj.weight)"
    assert found["weights"] == ("FAIL", wrong)


def test_tensor_of_another_shape_is_named(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    write_safetensors(model / "model.safetensors", {**SHAPES, "model.norm.weight": [17]})
    status, found = examine(capsys, str(model), "--port", "0")
    assert status == 1
    wrong = "1 of another shape: model.norm.weight [17] instead of [16]"
    assert wrong in found["weights"][1]


def test_another_format_than_the_option_names_fails_in_one_line(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    status, found = examine(capsys, str(model), "--port", "0", "--quantization", "gptq")
    assert status == 1
    failed = [line for line in found.values() if line[0] == "FAIL"]
    assert failed == [found["fit"]]
    assert "--quantization is gptq" in found["fit"][1]


def test_damaged_weights_and_tokenizer_are_both_reported(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    (model / "model.safetensors").write_bytes(b"\0" * 100)
    (model / "tokenizer.json").write_text("{}")
    status, found = examine(capsys, str(model), "--port", "0")
    assert status == 1
    assert found["weights"][0] == found["tokenizer"][0] == "FAIL"


def test_taken_port_and_missing_template_are_warnings(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    (model / "tokenizer_config.json").unlink()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, found = examine(capsys, str(model), "--port", port, "--kernels", "torch")
    assert status == 0
    assert "torch computes" in found["kernels"][1]
    assert found["port"][0] == found["chat"][0] == "warn"


@pytest.mark.parametrize(
    ("option", "check"),
    [
        ("--kv-tokens 900000000000", "fit"),
        ("--quantization gptq", "fit"),
        ("--enable-dp-attention --dp-size 2", "fit"),
        ("--allowed-local-media-path /nowhere", "server"),
    ],
)
def test_what_the_options_of_the_server_do_not_allow_fails(
    capsys: pytest.CaptureFixture[str], model: Path, option: str, check: str
) -> None:
    status, found = examine(capsys, str(model), "--port", "0", *option.split())
    assert status == 1
    assert found[check][0] == "FAIL"
    assert "only one engine" not in found["fit"][1]


def test_a_driver_that_does_not_answer_is_a_warning_and_the_cpu_computes(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Machine(
        2, 8_000_000_000, 8_000_000_000, (), "the NVIDIA driver does not answer", has_gpu_fault=True
    )
    monkeypatch.setattr(doctor, "probe", lambda: broken)
    status, found = examine(capsys, str(model), "--port", "0")
    assert status == 0
    assert found["gpu"] == ("warn", "none can be used: the NVIDIA driver does not answer")
    assert "on cpu in" in found["fit"][1]
    told: list[str] = []
    monkeypatch.setattr(prepare.log, "warning", told.append)
    prepare.prepare(EngineConfig(model=str(model)), broken)
    assert told == ["the CPU computes: the NVIDIA driver does not answer"]
    prepare.prepare(EngineConfig(model=str(model), device="cpu"), broken)
    assert len(told) == 1


def test_a_gpu_that_torch_cannot_use_fails_and_what_would_run_there_is_reported(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = GpuCard("NVIDIA H200", 140_000_000_000, 141_000_000_000)
    monkeypatch.setattr(doctor, "probe", lambda: Machine(2, 8_000_000_000, 8_000_000_000, (gpu,)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, found = examine(capsys, str(model), "--port", "0")
    assert status == 1
    assert found["gpu"] == ("ok", "NVIDIA H200 (140.0 GB of 141.0 GB free)")
    assert found["kernels-gpu"][0] == "FAIL"
    assert "cannot use it" in found["kernels-gpu"][1]
    assert "on cuda in bfloat16" in found["fit"][1]
    assert (
        "steps overlap, 19 graphs for up to 256 requests, prompts in pieces of 8,192 tokens"
        in found["fit"][1]
    )


def test_it_says_what_the_mechanisms_of_layers_cost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    _, found = examine(capsys, str(model), "--port", "0")
    assert found["layers"] == ("ok", "norms and sums are parts of products, as in Llama")
    olmo = make_checkpoint("olmo2", tmp_path / "olmo").folder
    (olmo / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    _, found = examine(capsys, str(olmo), "--port", "0", "--device", "cpu")
    assert found["layers"][1] == (
        "norms after attention and feed-forward part (8); norms of whole queries and keys (8): "
        "16 passes over activations in a step, which stays one call of the kernels, with 67% more "
        "operations and 1.09% more bytes where one request runs"
    )


@pytest.mark.parametrize(
    ("name", "gives"),
    [
        ("bert-mean", "vectors of 48 numbers, of length 1: the mean of all tokens"),
        ("bert-cls", "vectors of 48 numbers: the first token"),
        ("qwen3-labels", "scores of 4 labels, of the last token"),
        ("bert-pair", "scores of one label, of the first token"),
    ],
)
def test_the_output_of_a_model_without_text_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, gives: str
) -> None:
    folder = make_pooled(name, tmp_path).folder
    status, found = examine(capsys, str(folder), "--port", "0")
    assert status == 0, found
    assert found["gives"] == ("ok", gives)
    assert "chat" not in found
