"""Settings from the command line, the environment and a file, and what is said when they are
wrong."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from weft.config.engine import EngineConfig
from weft.config.engine_args import EngineArgs
from weft.config.limits import Limits
from weft.config.options import NEEDLESS, Command, SettingsError, as_written, option, options_of
from weft.config.server import ServerConfig


@dataclass(frozen=True, kw_only=True)
class Loom:
    model: str = option("", "what to weave", group="cloth")
    threads: int = option(
        4, "how many", group="cloth", everyday=True, low=1, high=100, elsewhere=("num_yarns",)
    )
    tension: float = option(1.0, "how tight", group="frame", low=0.0)
    pattern: str = option(
        "plain", "which", group="frame", everyday=True, choices=("plain", "twill", "satin")
    )
    shuttle: bool = option(True, "throw it", group="frame")


def command() -> Command:
    return Command("loom weave", "Weave.", Loom, positional="model")


def read(*argv: str, **environ: str) -> Loom:
    return command().read(argv, environ).make(Loom)


def words(text: str) -> str:
    return " ".join(text.split())


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        read(*argv, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_without_any_source() -> None:
    assert read() == Loom()


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "loom.toml"
    file.write_text('threads = 10\ntension = 2\npattern = "twill"\n')
    loom = read("--threads", "30", "--config", str(file), WEFT_THREADS="20", WEFT_TENSION="3.5")
    assert (loom.threads, loom.tension, loom.pattern, loom.shuttle) == (30, 3.5, "twill", True)


def test_file_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "loom.toml"
    file.write_bytes(b"\xef\xbb\xbfthreads = 10\r\nshuttle = false\r\n")  # as on Windows
    assert read(WEFT_CONFIG=str(file)) == Loom(threads=10, shuttle=False)


def test_variables_that_kubernetes_sets_for_services_are_no_settings() -> None:
    served = Command("weft serve", "", ServerConfig)
    port = ServerConfig().port
    for text in ("tcp://10.96.0.7:80", "udp://[fd00::7]:80", "sctp://10.96.0.7:80"):
        assert served.read([], {"WEFT_PORT": text}).make(ServerConfig).port == port
    assert served.read([], {"WEFT_PORT": "81"}).make(ServerConfig).port == 81
    with pytest.raises(SettingsError, match="WEFT_PORT is 'http://x'"):
        served.read([], {"WEFT_PORT": "http://x"})


def test_empty_variable_counts_as_unset() -> None:
    assert read(WEFT_THREADS="") == Loom()


@pytest.mark.parametrize(
    "spelling", [["--shuttle", "off"], ["--shuttle=OFF"], ["--no-shuttle"], ["--shuttle", "false"]]
)
def test_every_way_to_turn_a_switch_off(spelling: list[str]) -> None:
    assert read(*spelling).shuttle is False


def test_bare_switch_does_not_swallow_the_model() -> None:
    loom = read("--shuttle", "silk", WEFT_SHUTTLE="off")
    assert (loom.shuttle, loom.model) == (True, "silk")


def test_model_may_stand_before_after_or_between_options() -> None:
    for argv in (
        ["silk", "--threads", "9"],
        ["--threads", "9", "silk"],
        ["--threads=9", "silk", "--tension", "2"],
    ):
        assert read(*argv).model == "silk"
        assert read(*argv).threads == 9


def test_underscores_are_taken_for_dashes() -> None:
    @dataclass(frozen=True)
    class Two:
        two_words: int = option(0, "", group="g")

    assert Command("x", "", Two).read(["--two_words", "5"], {}).make(Two).two_words == 5


def test_negative_number_is_a_value() -> None:
    assert refusal("--threads", "-1") == "--threads is -1; 1 to 100 is expected"


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--schedule-policy", "foo", "--schedule-policy is 'foo'; there is no such policy; the"),
        ("--schedule-policy", "fair >", "--schedule-policy is 'fair >'; a policy is missing"),
        ("--tenant-ttft-ms", "a=x", "--tenant-ttft-ms is 'a=x'; NAME=MILLISECONDS with"),
        ("--tenant-ttft-ms", "b=1,a=x", "--tenant-ttft-ms is 'b=1,a=x'; 'a=x' is not understood"),
    ],
)
def test_an_error_names_option_and_value_once(option: str, value: str, told: str) -> None:
    serve = Command("weft serve", "Serve.", EngineConfig, ServerConfig)
    with pytest.raises(SettingsError) as caught:
        serve.read([option, value], {})
    assert str(caught.value).startswith(told)


def test_unknown_option_points_to_the_nearest() -> None:
    assert refusal("--thread", "3") == "unknown option --thread; did you mean --threads?"
    assert refusal("--no-shutle") == "unknown option --no-shutle; did you mean --shuttle?"


def test_name_of_another_engine_points_to_ours() -> None:
    assert refusal("--num-yarns=3") == "unknown option --num-yarns; its name in weft is --threads"


def test_unknown_option_without_a_near_one_points_to_the_list() -> None:
    assert refusal("--xyzzy") == "unknown option --xyzzy; loom weave --help all lists the options"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--threads", "many"], "--threads is 'many'; a whole number is expected"),
        (["--threads", "101"], "--threads is 101; 1 to 100 is expected"),
        (["--tension", "nan"], "--tension is nan; at least 0 is expected"),
        (["--tension", "tight"], "--tension is 'tight'; a number is expected"),
        (["--shuttle=perhaps"], "--shuttle is 'perhaps'; on or off is expected"),
        (
            ["--pattern", "satan"],
            "--pattern is 'satan'; one of plain, twill, satin is expected; did you mean satin?",
        ),
        (["--threads"], "--threads: expected one argument"),
        (["silk", "wool"], "unexpected argument 'wool'"),
        (["silk", "--model", "wool"], "model is given twice: 'silk' and by option"),
    ],
)
def test_bad_command_line_is_reported_in_one_line(argv: list[str], message: str) -> None:
    assert refusal(*argv) == message


def test_bad_variable_is_named() -> None:
    assert refusal(WEFT_THREADS="many") == "WEFT_THREADS is 'many'; a whole number is expected"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("thread = 3", "unknown key 'thread' in {file}; did you mean threads?"),
        ("num-yarns = 3", "unknown key 'num-yarns' in {file}; its name in weft is threads"),
        ('threads = "3"', "threads in {file} is '3'; a whole number is expected"),
        ("threads = true", "threads in {file} is True; a whole number is expected"),
        ("shuttle = 1", "shuttle in {file} is 1; true or false is expected"),
        ("threads = 1000", "threads in {file} is 1000; 1 to 100 is expected"),
        ("[cloth]\nthreads = 3", "{file} has the table [cloth]; settings stand without a table"),
    ],
)
def test_bad_file_is_reported_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "loom.toml"
    file.write_text(content)
    assert refusal("--config", str(file)) == message.format(file=file)


def test_broken_or_missing_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "loom.toml"
    assert (
        refusal("--config", str(file))
        == f"cannot read the configuration file {file}: No such file or directory"
    )
    file.write_text("threads = = 3")
    assert f"the configuration file {file} is not valid TOML" in refusal("--config", str(file))


def test_short_help_shows_everyday_options_only() -> None:
    text = command().help()
    assert "--threads" in text
    assert "--pattern" in text
    assert "--tension" not in text


def test_full_help_shows_all_and_a_section_shows_its_own() -> None:
    assert all(
        f"--{name}" in command().help("all")
        for name in ("threads", "tension", "pattern", "shuttle")
    )
    frame = command().help("frame")
    assert "--tension" in frame
    assert "--threads" not in frame
    with pytest.raises(SettingsError, match="there is help on all, cloth, frame"):
        command().help("weather")


def test_help_speaks_of_variables_only_where_they_count() -> None:
    assert "also an environment variable (WEFT_THREADS) and a key of the TOML" in words(
        command().help()
    )
    alone = Command("loom weave", "Weave.", Loom, positional="model", has_variables=False)
    assert "is also a key of the TOML file that --config names (threads = ...)" in words(
        alone.help()
    )


def test_everyday_options_of_serve_are_about_twenty_five() -> None:
    everyday = [
        item
        for config in (EngineConfig, ServerConfig)
        for item in options_of(config)
        if item.everyday
    ]
    assert 20 <= len(everyday) <= 28


def test_every_setting_is_an_option_with_a_help_text() -> None:
    for config in (EngineConfig, ServerConfig):
        assert len(options_of(config)) == len(fields(config))
        assert all(item.help and item.group for item in options_of(config))


def test_names_and_words_of_other_engines_that_mean_the_same_are_taken(tmp_path: Path) -> None:
    command = Command("weft serve", "", EngineConfig)
    file = tmp_path / "weft.toml"
    file.write_text('hicache-write-policy = "write_back"\n')
    for argv, expected in (
        (["--hicache-write-policy", "write_through"], "through"),
        (["--hicache_write_policy=write_through_selective"], "selective"),
        (["--cache-write", "write_back"], "back"),
        (["--config", str(file)], "back"),
    ):
        assert command.read(argv, {}).make(EngineConfig).cache_write == expected
    settings = command.read(["--disaggregation-mode", "null"], {})
    assert settings.make(EngineConfig).disaggregation_mode == "none"
    with pytest.raises(SettingsError, match="--cache-write is 'write'"):
        command.read(["--hicache-write-policy", "write"], {})


def test_an_error_names_an_option_as_it_was_written() -> None:
    error = "--max-draft is -1, --max-draft-len and --kv-tokens are not"
    argv = ["serve", "--num_speculative_tokens=-1", "--kv-tokens", "draft_max"]
    expected = error.replace("--max-draft is", "--num-speculative-tokens is")
    assert as_written(error, argv, EngineConfig) == expected


def test_names_of_other_engines_are_not_names_of_ours() -> None:
    options = [
        item for config in (EngineConfig, ServerConfig, Limits) for item in options_of(config)
    ]
    ours = {name for item in options for name in (item.name, *item.aliases)}
    theirs = [name for item in options for name in item.elsewhere]
    assert len(theirs) == len(set(theirs))
    assert ours.isdisjoint(theirs)


@pytest.mark.parametrize("name", list(NEEDLESS))
def test_options_that_weft_does_not_need_are_refused_with_the_reason(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    command = Command("weft serve", "", EngineConfig, ServerConfig, Limits)
    for word in (flag, f"--{name}"):
        with pytest.raises(SettingsError) as refused:
            command.read([word, "1"], {})
        assert str(refused.value) == f"unknown option {flag}; it is not needed: {NEEDLESS[name]}"


def test_engine_arguments_survive_the_pipe() -> None:
    config = EngineConfig(model="a/b", context_length=100, memory_fraction=0.5, overlap=False)
    args = EngineArgs(
        config=config,
        folder="/m",
        to_engine="ipc:///t",
        from_engine="ipc:///f",
        rpc="ipc:///r",
        log_level="debug",
    )
    line = args.to_json()
    assert b"\n" not in line
    assert EngineArgs.from_json(line) == args
