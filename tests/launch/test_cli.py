"""The command line before anything runs: help that costs nothing, and one paragraph for what the
user can mend."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import weft
from tests.launch.tiny_model import write_safetensors, write_tiny_model
from weft.cli import main as cli
from weft.cli.readable import readable
from weft.config.amounts import size
from weft.config.environment import unknown_variables
from weft.config.options import SettingsError
from weft.config.server import ServerConfig
from weft.launch import front
from weft.text.templates.chat_template import TemplateError

HEAVY = ("torch", "numpy", "starlette", "uvicorn", "tokenizers", "zmq", "msgspec")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on standard error of a command that ends with status 2."""
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("weft: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("weft: ").rstrip("\n")


def loaded_by(*commands: list[str]) -> set[str]:
    """The heavy modules that `weft` with these words, one after the other, has imported."""
    code = (
        f"import sys\nfrom weft.cli.main import main\nfor words in {commands}:\n"
        "  try: main(words)\n  except SystemExit: pass\n"
        f"print('loaded', *(name for name in {HEAVY} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    verbs = ("serve", "chat", "generate", "doctor")
    assert loaded_by(*([verb, "--help"] for verb in verbs)) == set()


def test_refusal_imports_nothing_that_loads_models() -> None:
    assert "torch" not in loaded_by(["serve", "/nowhere", "--port", "0"])


def test_help_does_not_load_the_families_of_models() -> None:
    code = (
        "import sys\nfrom weft.cli.main import main\nmain(['--help'])\n"
        "print('weft.config.model' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_import_of_the_package_is_instant() -> None:
    code = f"import sys, weft\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_public_names_are_found_when_asked_for() -> None:
    assert weft.SamplingParams(max_new_tokens=3).max_new_tokens == 3
    assert set(dir(weft)) >= {"LLM", "SamplingParams", "Output", "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Loom'"):
        _ = weft.Loom


def test_version_has_one_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"weft {weft.__version__}\n" * 2
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert "weft.version.__version__" in pyproject
    assert weft.__version__ not in pyproject


def test_bare_command_shows_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in cli.VERBS)


@pytest.mark.parametrize("verb", ["serve", "chat", "generate", "doctor"])
def test_help_is_short_and_all_is_longer(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert cli.main([verb, "--help"]) == 0
    short = capsys.readouterr().out
    assert cli.main([verb, "--help", "all"]) == 0
    assert len(capsys.readouterr().out) > len(short)


def test_unknown_verb_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean serve?" in refused(capsys, "sevre")
    assert "did you mean --port?" in refused(capsys, "serve", "--prot", "1")
    assert "its name in weft is --context-length" in refused(
        capsys, "serve", "--max-model-len", "1"
    )


def test_wrong_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "serve", "/no/where", "--port", "0") == "there is no folder /no/where"


def test_folder_without_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "has no config.json" in refused(capsys, "serve", str(tmp_path), "--port", "0")


def test_broken_config(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text('{"architectures": [')
    assert "config.json cannot be read" in refused(capsys, "serve", str(model), "--port", "0")


def test_unsupported_architecture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_tiny_model(
        tmp_path / "m", architectures=["LoomForCausalLM"], auto_map={"a": "b"}
    )
    message = refused(capsys, "serve", str(folder), "--port", "0")
    assert "LoomForCausalLM" in message
    assert "has no native implementation" in message
    assert "never run" in message
    own = refused(capsys, "serve", str(folder), "--port", "0", "--model-impl", "weft")
    assert re.search("supported are .*LlamaForCausalLM", own)
    assert "never run" in own


def test_missing_tokenizer(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refused(capsys, "serve", str(model), "--port", "0")


def test_pickled_weights(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "never read" in refused(capsys, "serve", str(model), "--port", "0")


@pytest.mark.parametrize("kept", [0, 5, 60, -4])
def test_half_downloaded_weights(
    capsys: pytest.CaptureFixture[str], model: Path, kept: int
) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert "not downloaded to its end" in refused(capsys, "serve", str(model), "--port", "0")


@pytest.mark.parametrize(
    ("dtype", "value"), [("F32", b"\0\0\xc0\x7f"), ("F16", b"\0\x7e"), ("BF16", b"\xc0\xff")]
)
def test_weights_that_are_no_numbers_are_refused(
    capsys: pytest.CaptureFixture[str], model: Path, dtype: str, value: bytes
) -> None:
    header = {"norm.weight": {"dtype": dtype, "shape": [16], "data_offsets": [0, 16 * len(value)]}}
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + 16 * value)
    message = refused(capsys, "serve", str(model), "--port", "0")
    assert "norm.weight holds values that are not finite numbers" in message


WRONG = [
    ({"eos_token_id": 300_000}, "eos_token_id is 300000; 0 to 257 are in the vocabulary"),
    ({"rope_theta": 0}, "rope_theta is 0; it must be a number greater than 1"),
    ({"rope_theta": -1.0}, "rope_theta is -1; it must be a number greater than 1"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05; it must be a number at least 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number at least 0"),
    ({"rope_theta": 10**400}, "rope_theta is inf; it must be a number greater than 1"),
    (
        {"rope_scaling": {"type": "linear", "factor": 0}},
        "factor is 0; it must be a number greater than 0",
    ),
]


@pytest.mark.parametrize(("config", "message"), WRONG)
def test_numbers_of_the_config_that_cannot_be_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, object], message: str
) -> None:
    folder = write_tiny_model(tmp_path / "m", **config)
    assert message in refused(capsys, "serve", str(folder), "--port", "0")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_a_file_nested_without_end_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], model: Path, name: str
) -> None:
    (model / name).write_text('{"a":' * 100_000)
    assert name in refused(capsys, "serve", str(model), "--port", "0")


def test_missing_shard(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors(model / "model-1.safetensors", {"a": [1]})
    assert "model-2.safetensors" in refused(capsys, "serve", str(model), "--port", "0")


def test_weights_do_not_matter_for_random_ones(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    (model / "model.safetensors").unlink()
    options = ("--load-format", "dummy", "--context-length", "999999")
    assert "--context-length is 999,999" in refused(
        capsys, "serve", str(model), "--port", "0", *options
    )


def test_too_little_memory(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    message = refused(capsys, "serve", str(model), "--port", "0", "--kv-tokens", "900000000000")
    assert "does not fit into memory" in message
    assert "Lower --kv-tokens" in message


def test_port_in_use_names_who_has_it(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(capsys, "serve", str(model), "--port", str(port))
    assert re.match(
        rf"port {port} on 127.0.0.1 is taken by \S+ \(pid \d+\); stop it, or choose another",
        message,
    )


def test_host_that_is_not_ours(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert "not an address of this machine" in refused(
        capsys, "serve", str(model), "--host", "192.0.2.1", "--port", "0"
    )


def test_debug_level_shows_where_it_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "/nowhere", "--port", "0", "--log-level", "debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("weft: there is no folder /nowhere\n")


def test_python_m_weft_is_weft() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weft", "serve", "/nowhere", "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "weft: there is no folder /nowhere\n"


def test_output_that_the_disk_does_not_take_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["version"]) == 1
    error = capsys.readouterr().err
    assert error == "weft: a file cannot be read or written: No space left on device\n"


def test_closed_streams_are_empty_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert cli.main(["version"]) == 0
    assert sys.stdin.read() == ""
    for name in ("stdin", "stdout", "stderr"):
        getattr(sys, name).close()


def test_a_character_that_the_output_has_not_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.version.__version__", "\u00b7")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert cli.main(["version"]) == 0
    assert sys.stdout.buffer.getvalue() == b"weft \\xb7\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "y"), "used: it is not text in UTF-8"),
        (FileNotFoundError(2, "No such file", "t.jinja"), "which cannot be used: No such file"),
        (TemplateError("line 3"), "which cannot be used: line 3"),
    ],
)
def test_a_chat_template_that_cannot_be_read_is_refused(
    fault: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(front, "start_helpers", fail)
    context: Any = SimpleNamespace(config=ServerConfig(chat_template="t.jinja"), limits=None)
    parts: Any = SimpleNamespace(tokenizer=None, processor=None)
    with pytest.raises(SettingsError, match=words):
        front.front_helpers(context, parts)


def test_chat_without_a_server_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert f"no server answers at 127.0.0.1:{port}" in refused(
            capsys, "chat", "--url", f"http://127.0.0.1:{port}/v1"
        )


def test_generate_wants_one_source_of_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert "either --prompt TEXT or --input FILE" in refused(capsys, "generate")


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--prompt", "x", "--output"],
        ["sim", "--json"],
        ["bench", "scheduler", "--json"],
        ["bench", "offline", "--trace"],
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]
) -> None:
    assert "there is no folder" in refused(capsys, *words, str(tmp_path / "none" / "file"))
    assert "this is a folder" in refused(capsys, *words, str(tmp_path))


def test_curves_that_cannot_be_drawn_are_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.config.outputs.find_spec", lambda name: None)
    assert "pip install matplotlib" in refused(capsys, "sim", "--plot", "curves.png")
    monkeypatch.setattr("weft.config.outputs.find_spec", lambda name: name)
    assert ".png, .svg, .pdf" in refused(capsys, "sim", "--plot", "curves.doc")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("download", "weft pull fetches a model"),
        ("ls", "weft list shows"),
        ("run", "weft chat MODEL chats"),
        ("srve", "did you mean serve?"),
    ],
)
def test_a_command_of_other_engines_is_answered_with_that_of_weft(
    capsys: pytest.CaptureFixture[str], word: str, hint: str
) -> None:
    assert hint in refused(capsys, word)


def test_every_command_that_a_hint_names_is_there() -> None:
    for hint in cli.ELSEWHERE.values():
        assert set(re.findall(r"\bweft (\w+)", hint)) <= set(cli.VERBS)


def test_a_variable_that_nothing_reads_is_named_with_a_similar_one() -> None:
    of_kubernetes = {
        "WEFT_PORT": "tcp://10.0.0.1:80",
        "WEFT_SERVICE_HOST": "10.0.0.1",
        "WEFT_SERVICE_PORT_HTTP": "80",
        "WEFT_ROUTER_SERVICE_PORT": "80",
        "WEFT_ROUTER_PORT": "tcp://10.0.0.1:80",
        "WEFT_PORT_30000_TCP": "tcp://10.0.0.1:30000",
        "WEFT_PORT_30000_TCP_ADDR": "10.0.0.1",
    }
    read = {"WEFT_THREADS": "2", "WEFT_WORKER": "http://a", "WEFT_CACHE": "/tmp", "HOME": "/"}
    assert list(unknown_variables(of_kubernetes | read)) == []
    assert list(unknown_variables({"WEFT_MAX_MODEL_LEN": "512"})) == [
        "nothing reads the variable WEFT_MAX_MODEL_LEN; its name in weft is WEFT_CONTEXT_LENGTH"
    ]
    assert list(unknown_variables({"WEFT_PROT": "1", "WEFT_XYZZY": ""})) == [
        "nothing reads the variable WEFT_PROT; did you mean WEFT_PORT?",
        "nothing reads the variable WEFT_XYZZY",
    ]


def test_every_option_of_every_command_is_a_known_variable() -> None:
    root = Path(weft.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if " = option(" not in path.read_text("utf-8"):
            continue
        name = ".".join(["weft", *path.relative_to(root).with_suffix("").parts])
        options = re.findall(
            r"^    (\w+): [\w| ]+ = option\(", path.read_text("utf-8"), re.MULTILINE
        )
        found = {f"WEFT_{option.upper()}": "" for option in options}
        assert name == name
        assert list(unknown_variables(found)) == []


def test_variables_that_are_no_options_are_those_that_the_code_reads() -> None:
    root = Path(weft.__file__).parent
    text = "".join(path.read_text("utf-8") for path in sorted(root.rglob("*.py")))
    named = set(re.findall(r'environ(?:\.get\(|\[)"(WEFT_\w+)"', text))
    assert list(unknown_variables(dict.fromkeys(named, ""))) == []


def test_sizes_of_every_order_are_readable() -> None:
    texts = [size(each) for each in (4e3, 5.12e8, 1.64e10, 2e12, 3.072e15)]
    assert texts == ["4 kB", "512 MB", "16.4 GB", "2.0 TB", "3.1 PB"]


def test_a_policy_whose_module_is_not_found_says_where_it_is_looked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["sim", "--policy"], ["serve", "weft-nano", "--schedule-policy"]):
        text = refused(capsys, *words, "no_such_policy:Mine")
        assert "there is no module 'no_such_policy'" in text
        assert "PYTHONPATH=FOLDER" in text


def test_a_table_has_no_empty_column_and_no_endless_number() -> None:
    rows = [{"rid": "a", "grammar": None, "age_s": 2.568314439}, {"rid": "b", "why": ""}]
    assert list(readable(rows)) == ["rid  age_s", "a    2.568", "b    -"]
    assert list(readable({"small": 0.00012345, "whole": 3.0})) == [
        "small  0.0001234",
        "whole  3",
    ]
