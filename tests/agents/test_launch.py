"""`weft launch`: how each agent is pointed at a server, and that nothing of the user's is
changed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.model import scripted_model
from weft.cli.agents.launch import EXIT_NOT_FOUND, launch
from weft.cli.agents.table import AGENTS, INSTALLERS, NO_KEY, AgentTarget
from weft.config.options import SettingsError

CONTEXT = 100_000
# Writes its arguments, its variables, the files in the folder of its run, and that folder.
PROGRAM = """
import json, os, pathlib, sys
named = [pathlib.Path(word) for word in [*sys.argv[1:], *os.environ.values()] if "/weft-" in word]
around = [one for path in named for one in [path, *path.parents]]
folders = [one for one in around if one.name.startswith("weft-") and one.is_dir()]
files = {file.name: file.read_text() for file in folders[0].iterdir()} if folders else {}
seen = [sys.argv[1:], dict(os.environ), files, str(folders[0]) if folders else ""]
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(seen))
sys.exit(7)
"""
TARGET = AgentTarget("http://host:1", "org/model", "org/small", CONTEXT, "/folder", "secret")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_model(lambda prompt: "Hello.", context=CONTEXT) as (server, _):
        yield server.url


@pytest.fixture
def fake_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where each agent is a program that writes its arguments, variables and files as
    JSON."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        program = folder / agent.command
        program.write_text(f"#!{sys.executable}\n{PROGRAM}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return tmp_path / "seen"


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_the_servers_address_and_its_model(
    name: str, url: str, fake_agent: Path
) -> None:
    assert launch([name, "--url", f"{url}/v1", "--", "--its-own", "word"]) == 7
    words, variables, files, folder = json.loads(fake_agent.read_text())
    assert words[-2:] == ["--its-own", "word"]
    told = "\n".join([*words, *variables.values(), *files.values()])
    assert url in told
    assert "byte-model" in told
    assert str(CONTEXT) in told or name in ("mini", "openhands")
    assert not folder or not Path(folder).exists()


@pytest.mark.parametrize("name", AGENTS)
def test_the_key_of_the_user_is_used_and_never_shown(
    name: str, url: str, fake_agent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch([name, "--url", url, "--api-key", "top-secret", "--print"]) == 0
    shown = capsys.readouterr().out
    assert "top-secret" not in shown
    assert "YOUR_KEY" in shown
    assert AGENTS[name].command in shown
    assert not fake_agent.exists()
    launch([name, "--url", url, "--api-key", "top-secret"])
    words, variables, files, _ = json.loads(fake_agent.read_text())
    assert "top-secret" in "\n".join([*words, *variables.values(), *files.values()])


@pytest.mark.parametrize("name", AGENTS)
def test_what_is_printed_is_a_script(
    name: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch([name, "--url", url, "--print", "--", "it's"]) == 0
    shown = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=shown, text=True, check=False).returncode == 0
    assert shlex.split(shown.splitlines()[-1])[-1] == "it's"


@pytest.mark.parametrize("name", AGENTS)
def test_files_are_written_only_into_the_folder_of_the_run(name: str) -> None:
    setup = AGENTS[name].setup(TARGET)
    assert all(Path(file).name == file for file in setup.files)
    assert "HOME" not in setup.variables
    assert not any(word.startswith("~") for word in setup.arguments)


def test_a_missing_agent_is_told_of_with_the_command_that_installs_it(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, agent in AGENTS.items():
        assert launch([name, "--url", url]) == EXIT_NOT_FOUND
        told = capsys.readouterr().err
        assert agent.install in told
        assert told.rstrip().endswith(INSTALLERS[agent.install.split()[0]])
    (tmp_path / "npm").write_text("#!/bin/sh\n")
    (tmp_path / "npm").chmod(0o755)
    assert launch(["codex", "--url", url]) == EXIT_NOT_FOUND
    assert capsys.readouterr().err.rstrip().endswith(AGENTS["codex"].install)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_launch_ends_the_agent_and_its_folder(
    url: str, tmp_path: Path, number: signal.Signals
) -> None:
    program = tmp_path / "qwen"
    program.write_text(
        f"#!{sys.executable}\nimport os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"
    )
    program.chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    path = f"{tmp_path}:{os.environ['PATH']}"
    with subprocess.Popen(
        [sys.executable, "-m", "weft", "launch", "qwen", "--url", url],
        env={**os.environ, "PATH": path, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    ) as launched:
        assert launched.stdout is not None
        pid = int(launched.stdout.readline())
        assert len(list(temporary.iterdir())) == 1
        launched.send_signal(number)
        assert launched.wait() == 128 + number
    assert list(temporary.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_wrong_words_are_refused(url: str) -> None:
    for words, message in [
        (["codx", "--url", url], "did you mean codex"),
        (["--url", url], "name an agent"),
        (["codex", "--url", url, "--model", "other"], "the server has tiny/byte-model"),
        (["codex", "--url", "http://127.0.0.1:9"], "weft serve starts one"),
    ]:
        with pytest.raises(SettingsError, match=message):
            launch(words)


def test_an_agent_that_lacks_room_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_model(lambda prompt: "Hello.", context=9_000) as (server, _):
        assert launch(["codex", "--url", server.url, "--print"]) == 0
    assert "context of 9,000 tokens" in capsys.readouterr().err


def test_codex_is_set_up_by_arguments_that_are_toml() -> None:
    import tomllib

    words = AGENTS["codex"].setup(TARGET).arguments
    assert words[::2] == ("-c",) * (len(words) // 2)
    found = tomllib.loads("\n".join(words[1::2]))
    assert found["model_providers"]["weft"]["base_url"] == "http://host:1/v1"
    assert found["model_context_window"] == CONTEXT
    assert NO_KEY not in words
