"""`weft completion` and `weft help`: what a shell completes is what the commands take, and what a
topic names is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from weft.cli.completion import SHELLS, tree
from weft.cli.main import VERBS, main
from weft.cli.topics import TOPICS

ROOT = Path(__file__).parents[2]
BASH = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(( $# - 1 ))
_weft
echo "${COMPREPLY[@]}"
"""
ZSH = """
compadd() { shift; print -r -- "$@" }
_files() { }
compdef() { }
source "$1"
shift
words=("$@")
CURRENT=$#
_weft
"""
FISH = 'source $argv[1]; complete -C (string join " " -- $argv[2..-1])'
PROGRAMS = {
    "bash": ["bash", "--norc", "-c", BASH, "bash"],
    "zsh": ["zsh", "-f", "-c", ZSH, "zsh"],
    "fish": ["fish", "--no-config", "-c", FISH],
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scripts")
    nodes = tree()
    found = {}
    for shell, write in SHELLS.items():
        found[shell] = folder / f"weft.{shell}"
        found[shell].write_text(write(nodes) + "\n", encoding="utf-8")
    return found


def completed(script: Path, *words: str) -> list[str]:
    """What the shell of `script` offers for the last of `words`; zsh and fish also what does not
    begin with it."""
    shell = script.suffix.removeprefix(".")
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    command = [*PROGRAMS[shell], str(script), "weft", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("ser",), "serve"),
        (("serve", "--port", "1", "--kv-dt"), "--kv-dtype"),
        (("serve", "--kv-dtype", ""), "int8"),
        (("serve", "--no-over"), "--no-overlap"),
        (("ctl", "cac"), "cache"),
        (("ctl", "cache", "s"), "show"),
        (("ctl", "cache", "pin", "--tt"), "--ttl"),
        (("bench", "of"), "offline"),
        (("help", "mem"), "memory"),
        (("completion", ""), "fish"),
    ],
    ids=" ".join,
)
def test_a_shell_completes(
    scripts: dict[str, Path], shell: str, words: tuple[str, ...], offered: str
) -> None:
    found = completed(scripts[shell], *words)
    assert offered in found
    if shell == "bash":  # the others sort by themselves
        assert all(one.startswith(words[-1]) for one in found)


def test_every_verb_and_option_can_be_completed() -> None:
    nodes = tree()
    assert nodes[()].words == [*VERBS, "help"]
    assert {"--port", "--kv-tokens", "--config"} <= nodes["serve",].options.keys()
    assert nodes["serve",].options["--attention-backend"] == ("auto", "torch", "triton")
    assert nodes["ctl", "models"].words == ["list", "loaded", "load", "unload"]
    assert "--streams" in nodes["bench", "offline"].options


def test_another_shell_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert capsys.readouterr().err == "weft: there is no completion for 'csh': bash, zsh, fish\n"
    assert main(["completion", "bash", "more"]) == 2


def test_help_with_a_verb_is_the_help_of_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "list"]) == 0
    shown = capsys.readouterr().out
    assert main(["list", "--help"]) == 0
    assert capsys.readouterr().out == shown


def test_help_lists_the_topics_and_shows_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    for name, topic in TOPICS.items():
        assert f"  {name:10} {topic.about}\n" in shown
        assert main(["help", name]) == 0
        assert topic.text in capsys.readouterr().out
    assert main(["help", "modles"]) == 2
    assert "did you mean models" in capsys.readouterr().err


@pytest.mark.parametrize("name", TOPICS)
def test_a_topic_names_commands_options_and_a_page_that_are_there(name: str) -> None:
    topic = TOPICS[name]
    assert (ROOT / "docs" / topic.page).is_file()
    assert max(map(len, topic.text.splitlines())) <= 100
    nodes = tree()
    for verb in re.findall(r"weft ([a-z]+)", topic.text):
        assert verb in VERBS
    known = set().union(*(node.options for node in nodes.values()))
    assert set(re.findall(r"--[a-z][a-z-]+", topic.text)) <= known
