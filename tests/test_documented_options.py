"""Every option that a page names is one of weft's, of a program of this repository, or of a listed
foreign one; and every option of weft is on a page, and is set by a test."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from weft.cli.bench import BENCHES
from weft.cli.ctl.command import arguments_of
from weft.cli.ctl.table import COMMANDS
from weft.cli.main import VERBS, main
from weft.config.engine import EngineConfig
from weft.config.limits import Limits
from weft.config.options import Option, options_of
from weft.config.relay import RelayConfig
from weft.config.server import ServerConfig
from weft.config.several import ModelsConfig

ROOT = Path(__file__).parents[1]
# coming.md has tables of the options of others, which docs/test_coming.py compares with weft's.
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.name != "coming.md"
]
# Pages that are made from the options say nothing of what they are good for.
HAND_WRITTEN = [page for page in PAGES if page.name not in ("command-line.md", "limits.md")]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
OPTIONS = {
    option.name: option
    for config in (EngineConfig, ServerConfig, ModelsConfig, RelayConfig)
    for option in options_of(config)
}
LIMITS = {option.name for option in options_of(Limits)}  # limits.md has a table with their reasons
PROGRAMS = ("benchmarks", "scripts", "tests", "training")
FOREIGN = {  # programs of others that a page shows a command of
    "curl": {"--data", "--data-binary"},
    "docker": {"--build", "--build-arg", "--format", "--gpus", "--profile", "--rm"},
    "ik_llama.cpp": {"--flash", "--repack"},
    "helm": {"--reuse-values", "--set"},
    "kubectl": {"--from-literal"},
    "gh, sha256sum": {"--repo", "--check", "--ignore-missing"},
    "pip": {"--no-deps", "--require-hashes", "--upgrade"},
    "vllm bench serve": {
        *(
            "--backend",
            "--base-url",
            "--dataset-name",
            "--endpoint",
            "--max-concurrency",
            "--model",
            "--num-prompts",
        ),
        *("--random-input-len", "--random-output-len", "--tokenizer"),
    },
    "guidellm": {"--backend", "--constraint", "--data", "--model", "--profile", "--tokenizer"},
    "sglang-router": {"--pd-disaggregation", "--prefill", "--decode"},
    "aiperf": {
        *(
            "--concurrency",
            "--endpoint-type",
            "--model",
            "--output-tokens-mean",
            "--request-count",
            "--streaming",
        ),
        *("--synthetic-input-tokens-mean", "--tokenizer", "--url"),
    },
}
_WORD = re.compile(r"(?<![\w-])(?:--[\w-]+|[A-Z][A-Z_]+)(?![\w-])")
_KEYWORD = re.compile(r"(?<![\w.])(\w+)=(?=[^=])")
_KEY = re.compile(r'"(\w+)"[:,]')
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_DEFINED = re.compile(r'(?:add_argument|addoption)\(\s*"(--[a-z][a-z0-9-]*)"')
_OF_CLASS = re.compile(r"^    ([a-z]\w*): \w+ = option\($", re.MULTILINE)
_OF_SHELL = re.compile(r'"\$\{1:-\}" = (--[a-z][a-z0-9-]*) \]')  # the first argument of a script
_SWITCH = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*) on\|off")


@pytest.fixture(scope="module")
def known() -> set[str]:
    return {"--version"} | set().union(
        *FOREIGN.values(), *map(_of_verb, VERBS), *map(_of_program, PROGRAMS)
    )


def _of_verb(verb: str) -> set[str]:
    """The options in the whole help of a verb of weft. A switch can be negated."""
    if verb == "version":
        return set()
    if verb == "ctl":
        names = {
            one.name for each in COMMANDS for one in arguments_of(each) if one.name.startswith("--")
        }
        return names | _in_help("ctl", "--help")
    if verb == "bench":
        return set().union(*(_in_help("bench", name, "--help", "all") for name in BENCHES))
    return _in_help(verb, "--help", "all")


def _in_help(*argv: str) -> set[str]:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(list(argv)) == 0
    text = told.getvalue()
    return {*_OPTION.findall(text), *(f"--no-{name}" for name in _SWITCH.findall(text))}


def _of_program(place: str) -> set[str]:
    """The options that the sources below a folder of this repository define."""
    files = [
        path for path in (ROOT / place).rglob("*") if path.is_file() and path.suffix in ("", ".py")
    ]
    texts = [path.read_text(encoding="utf-8") for path in files]
    forms = (_DEFINED, _OF_SHELL)
    fields = {name for text in texts for name in _OF_CLASS.findall(text)}
    return {
        *(name for text in texts for form in forms for name in form.findall(text)),
        *(f"--{name.replace('_', '-')}" for name in fields),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_that_a_page_names_is_there(page: Path, known: set[str]) -> None:
    named = set(_OPTION.findall(page.read_text(encoding="utf-8")))
    assert sorted(named - known) == []


def test_an_option_that_nobody_has_is_noticed(known: set[str]) -> None:
    assert {"--no-such-option", "--kv-token"}.isdisjoint(known)
    assert {"--kv-tokens", "--no-cuda-graph", "--minutes", "--requests"} <= known


def test_every_option_is_on_a_page_that_says_what_it_is_for() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in HAND_WRITTEN)
    words = words_in(text)
    missing = [
        name
        for name, option in OPTIONS.items()
        if name not in LIMITS and not is_named(option, words) and f"`{name}`" not in text
    ]
    assert missing == []


def test_every_option_is_set_by_a_test() -> None:
    """What a test states of it cannot be checked here: the options that reach a part that has tests
    of its own are in `launch/test_passed_options.py`."""
    own = Path(__file__)
    text = "\n".join(test.read_text(encoding="utf-8") for test in TESTS if test != own)
    every = {**OPTIONS, **{option.name: option for option in options_of(Limits)}}
    words = words_in(text)
    keywords = {*_KEYWORD.findall(text), *_KEY.findall(text)}
    missing = [
        name
        for name, option in every.items()
        if not is_named(option, words) and name not in keywords
    ]
    assert missing == []


def words_in(text: str) -> set[str]:
    """Its words of command lines and of the environment."""
    return set(_WORD.findall(text))


def is_named(option: Option, words: set[str]) -> bool:
    """Whether the option is one of these words of a command line, or of the environment."""
    flag = option.name.replace("_", "-")
    return not words.isdisjoint((f"--{flag}", f"--no-{flag}", option.env))
