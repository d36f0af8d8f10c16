"""One definition of each setting: a dataclass field that is also a command-line option, an
environment variable and a key of the configuration file. The command line has priority over the
environment, the environment over the file, and the file over the default.

    context_length: int = option(0, "longest prompt and completion together", group="model")

is `--context-length N` (also `--context_length`), `WEFT_CONTEXT_LENGTH=N`, and `context_length = N`
in the TOML file that `--config FILE` (or `WEFT_CONFIG`) names. A switch is `--overlap on` or
`--overlap off`, in short `--overlap` or `--no-overlap`. Knows nothing of the meaning of settings.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, TypeAlias, TypeVar

from weft.json_types import JsonObject

Value: TypeAlias = str | int | float | bool | None

# Options of other engines, or of an earlier weft, for which weft needs no option: the reason.
_REASONS = {
    "weft looks for new messages at every step": (
        "scheduler_recv_interval",
        "recv_interval",
        "recv_weights",
    ),
    "all layers are on one device, which --device names": (
        *("n_gpu_layers", "gpu_layers", "ngl"),
        "cpu_offload_gb",
    ),
    "attention never writes a matrix of scores": ("flash_attn", "flash_attention"),
    "the model's chat template is always used": ("jinja",),
    "requests are always batched continuously": ("cont_batching",),
    "tools are served without it": ("enable_auto_tool_choice",),
    "/metrics is always there": ("enable_metrics", "metrics"),
    "GET /requests lists what runs and waits": ("slots",),
    "code of a checkpoint is never run": ("trust_remote_code",),
    "a request has its own, in the field grammar": ("grammar",),
    "KV goes from one server to another over TCP": ("disaggregation_transfer_backend",),
    "servers that hand over KV need not know how the other one is divided": (
        *("disaggregation_decode_tp", "disaggregation_decode_dp"),
        "disaggregation_prefill_pp",
    ),
}
NEEDLESS = {name: reason for reason, names in _REASONS.items() for name in names}

# Begin the names of options that switch something off.
_NEGATIONS = ("disable_", "enforce_", "no_")

SWITCH_WORDS = {
    "on": True,
    "true": True,
    "yes": True,
    "1": True,
    "off": False,
    "false": False,
    "no": False,
    "0": False,
}
ENV_PREFIX = "WEFT_"


class SettingsError(ValueError):
    """The user's settings cannot be used. The message is one paragraph: which setting, why, and
    which value works."""


class TooLarge(SettingsError):
    """The model does not fit into the memory."""


class Config(Protocol):
    """A dataclass whose fields are made by `option`."""

    __dataclass_fields__: ClassVar[JsonObject]


C = TypeVar("C", bound=Config)


def option(
    default: Any,
    help: str,
    *,
    group: str,
    everyday: bool = False,
    changeable: bool = False,
    choices: tuple[str, ...] | str = (),
    judge: str = "",
    low: float | None = None,
    high: float | None = None,
    several: bool = False,
    elsewhere: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    words: tuple[tuple[str, str], ...] = (),
) -> Any:
    """A dataclass field that users can set. `default` has its type; a switch whose default the
    machine decides has None.

    `everyday` options are in the short `--help`; `changeable` options can be changed while the
    engine runs; numbers are within `low`..`high`. `choices`: the allowed words, or
    "package.module:function" of a function that returns them; then a higher package lists the
    choices, and is imported only when they are needed. `several`: the value is a text of several
    lines; each line is a word of the command line, or an item of a TOML list, a Python list or a
    dictionary. `elsewhere`: names of the same setting in other engines; an error names this option
    for them. `aliases`: names with exactly the same meaning, which are accepted. `words`: pairs of
    another word for a value, and weft's word. `judge`: "package.module:function" of a function that
    gets a word outside of `choices` and returns its fault, or "" if the word is valid; it does not
    repeat the word.
    """
    spec = Option(
        "",
        default,
        help,
        group,
        everyday,
        changeable,
        choices,
        judge,
        low,
        high,
        several,
        elsewhere,
        aliases,
        dict(words),
    )
    return field(default=default, metadata={"option": spec})


@dataclass(frozen=True)
class Option:
    name: str  # name of the field
    default: Value
    help: str
    group: str
    everyday: bool
    changeable: bool
    source: tuple[str, ...] | str  # the choices, or the name of a function that lists them
    judge: str  # name of a function that checks other words; "": no other words are allowed
    low: float | None
    high: float | None
    several: bool
    elsewhere: tuple[str, ...]
    aliases: tuple[str, ...]
    words: Mapping[str, str]

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words; empty if any value is allowed."""
        if not isinstance(self.source, str):
            return self.source
        words: tuple[str, ...] = _function(self.source)()
        return words

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return self.default is None or isinstance(self.default, bool)

    def from_text(self, text: str, source: str) -> Value:
        """The value in `text`. Raises SettingsError, which names `source`: the flag or variable as
        given.
        """
        text = self.words.get(text, text)
        if self.is_switch:
            if text.lower() not in SWITCH_WORDS:
                raise SettingsError(f"{source} is {text!r}; on or off is expected")
            return SWITCH_WORDS[text.lower()]
        assert self.default is not None
        try:
            return self.checked(type(self.default)(text), source)
        except SettingsError:
            raise
        except ValueError as exc:
            kind = "a number"
            if isinstance(self.default, int):
                kind = "a whole number"
            raise SettingsError(f"{source} is {text!r}; {kind} is expected") from exc

    def from_toml(self, value: object, source: str) -> Value:
        """The value of a setting in a TOML file. Raises SettingsError if its type does not fit."""
        if isinstance(value, str) and value in self.words:
            return self.from_text(value, source)
        if self.several and isinstance(value, list):
            value = "\n".join(_line(item) for item in value)
        if isinstance(self.default, float) and type(value) is int:
            value = float(value)
        kind = bool if self.is_switch else type(self.default)
        if type(value) is not kind:
            kinds = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
            raise SettingsError(f"{source} is {value!r}; {kinds[kind]} is expected")
        return self.checked(value, source)

    def from_python(self, value: object, source: str) -> Value:
        """The value of a setting in a Python program; a path and other libraries' whole numbers are
        accepted. Raises SettingsError if its type does not fit."""
        if value is None and self.default is None:
            return None
        if self.several and isinstance(value, dict):
            value = [f"{name}={item}" for name, item in value.items()]
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, Path):
            value = str(value)
        elif not isinstance(value, bool) and isinstance(value, Integral):
            value = int(value)
        return self.from_toml(value, source)

    def wrong_word(self, value: object) -> str:
        """The fault of a value that is none of the allowed words; "" if the value is allowed."""
        if value in self.choices or not (self.choices or self.judge):
            return ""
        if self.judge and isinstance(value, str):
            why: str = _function(self.judge)(value)
            return why
        if not self.choices:
            return "a text is expected"
        hint = did_you_mean(str(value), self.choices)
        return f"one of {', '.join(self.choices)} is expected{hint}"

    def checked(self, value: Value, source: str) -> Value:
        wrong = self.wrong_word(value)
        if wrong:
            raise SettingsError(f"{source} is {value!r}; {wrong}")
        if isinstance(value, int | float):
            low = self.low
            high = self.high
            if not (
                (low is None or value >= low) and (high is None or value <= high)
            ):  # NaN fails too
                bounds = f"at least {low:,g}" if high is None else f"{low:,g} to {high:,.15g}"
                raise SettingsError(f"{source} is {value}; {bounds} is expected")
        return value


def _function(name: str) -> Callable[..., Any]:
    """The function with the name "package.module:function"."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _line(item: object) -> str:
    """An item of a list as a line of text."""
    if isinstance(item, dict):
        return json.dumps(item, default=str)
    return str(item)


def options_of(config: type[Config]) -> list[Option]:
    """The options that are fields of `config`, in order."""
    specs = [(item.name, item.metadata["option"]) for item in fields(config)]
    return [Option(**{**vars(spec), "name": name}) for name, spec in specs]


def options_by_name(config: type[Config]) -> dict[str, Option]:
    return {option.name: option for option in options_of(config)}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suffix for an error message; "" if no known word is similar."""
    near = difflib.get_close_matches(word, list(known), n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return ""


def as_written(message: str, argv: Sequence[str], config: type[Config]) -> str:
    """The message of an error with the names of options as they are in `argv`, where they may be
    aliases."""
    names = {_option_name(word) for word in argv if word.startswith("--")}
    for option in options_of(config):
        for alias in names.intersection(option.aliases):
            flag = "--" + alias.replace("_", "-")
            message = re.sub(rf"{option.flag}(?![\w-])", flag, message)
    return message


def _option_name(word: str) -> str:
    """The name of the option that a word of the command line sets."""
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def asked_help(argv: Sequence[str]) -> str | None:
    """The section in `-h`, `--help` or `--help SECTION`; "" for the short help, None if no help is
    requested."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        if word == "--":
            return None
        if word in ("-h", "--help"):
            if following.startswith("-"):
                return ""
            return following
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


class Settings:
    """The values that the user has set, from all sources."""

    def __init__(
        self,
        values: Mapping[str, Value],
        words: Sequence[str] = (),
        tables: Mapping[str, Mapping[str, Settings]] | None = None,
    ) -> None:
        """`words`: the arguments without a flag, if the command takes several; `tables`: the tables
        of the configuration file, by the name of the group and their own."""
        self._values = values
        self.words = tuple(words)
        self.tables = tables or {}

    def with_values(self, other: Settings) -> Settings:
        """These settings with the values of `other`, which have priority."""
        return Settings({**self._values, **other._values}, self.words, self.tables)

    def make(self, config: type[C]) -> C:
        """A `config` with the user's values, and defaults for the rest."""
        return config(**self.given(config))

    def given(self, config: type[Config]) -> JsonObject:
        """The user's values for fields of `config`, by name."""
        return {
            item.name: self._values[item.name]
            for item in fields(config)
            if item.name in self._values
        }


class _OptionParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message.removeprefix("argument "))


class Command:
    """The options of one command: the fields of some dataclasses, and `--config`. `positional`: the
    option that needs no flag; `takes_several`: it may be there several times. `tables`: the tables
    that the file may have, [GROUP.NAME], with the options of each. `has_variables`: its options may
    stand in the environment; the help says so, and `read` gets that part of it which counts.
    """

    def __init__(
        self,
        name: str,
        about: str,
        *configs: type[Config],
        positional: str = "",
        takes_several: bool = False,
        tables: Mapping[str, Mapping[str, Option]] | None = None,
        has_variables: bool = True,
    ) -> None:
        self._has_variables = has_variables
        self._name = name
        self._about = about
        self._positional = positional
        self._takes_several = takes_several
        self._tables = tables or {}
        self._options = {option.name: option for config in configs for option in options_of(config)}
        self._aliases = {
            alias: option.name for option in self._options.values() for alias in option.aliases
        }
        assert len(self._options) == sum(len(fields(config)) for config in configs), (
            "two fields of one name"
        )

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(option.group for option in self._options.values()))

    def help(self, section: str = "") -> str:
        """The help text of everyday options, of one group, or of all options ("all"). Raises
        SettingsError for other sections.
        """
        if section and section not in ("all", *self.groups):
            raise SettingsError(f"--help {section}: there is help on all, {', '.join(self.groups)}")
        if section:
            shown = {
                name for name, option in self._options.items() if section in ("all", option.group)
            }
        else:
            shown = {name for name, option in self._options.items() if option.everyday}
        return self._parser(shown).format_help()

    def read(self, argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
        """The values that the user has set. Raises SettingsError."""
        words, written = self._command_line(argv)
        path = written.pop("config", "") or environ.get(ENV_PREFIX + "CONFIG", "")
        values: dict[str, Value] = {}
        tables: dict[str, dict[str, Settings]] = {}
        if path:
            values, tables = self._file(Path(path))
        for name, option in self._options.items():
            text = environ.get(option.env, "")
            if text and not _is_service_link(option.env, text):
                values[name] = option.from_text(text, option.env)
        for name, text in written.items():
            values[name] = self._options[name].from_text(text, self._options[name].flag)
        return Settings(values, words, tables)

    def _command_line(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The words without a flag if there are several, and the texts of the options."""
        parsed, unknown = self._parser(set()).parse_known_args(self._normalized(argv))
        for word in unknown:
            if word.startswith("-"):
                raise SettingsError(f"unknown option {word.partition('=')[0]}{self._hint(word)}")
        if unknown and not self._takes_several:
            raise SettingsError(f"unexpected argument {unknown[0]!r}")
        written: dict[str, str] = {}
        words: list[str] = []
        if self._takes_several:
            words = [*parsed.positional, *unknown]  # also after options
            parsed.positional = words[0] if len(words) == 1 else None
            if len(words) > 1 and getattr(parsed, self._positional) is not None:
                raise SettingsError(f"{self._positional} is set by option, and as {words[0]!r}")
        for name, text in vars(parsed).items():
            if isinstance(text, list):  # an option of several lines, given several times
                text = "\n".join(text)
            if text is not None:
                written[name] = text
        if "positional" in written:
            if self._positional in written:
                raise SettingsError(
                    f"{self._positional} is given twice: {written['positional']!r} and by option"
                )
            written[self._positional] = written.pop("positional")
        return (words if len(words) > 1 else []), written

    def _file(self, path: Path) -> tuple[dict[str, Value], dict[str, dict[str, Settings]]]:
        """The values of a configuration file, and its tables."""
        import tomllib

        try:
            content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as exc:
            raise SettingsError(
                f"cannot read the configuration file {path}: {exc.strerror}"
            ) from exc
        except ValueError as exc:
            hint = ""
            if path.suffix in (".yaml", ".yml", ".json"):
                hint = "; settings are written in TOML: kv_tokens = 4096"
            message = f"the configuration file {path} is not valid TOML: {exc}{hint}"
            raise SettingsError(message) from exc
        values: dict[str, Value] = {}
        tables: dict[str, dict[str, Settings]] = {}
        for key, value in content.items():
            if key in self._tables:
                tables[key] = self._read_tables(key, value, path)
                continue
            name = key.replace("-", "_")
            name = self._aliases.get(name, name)
            if isinstance(value, dict) and name not in self._options:
                raise SettingsError(f"{path} has the table [{key}]; settings stand without a table")
            if name not in self._options:
                hint = _key_hint(name, self._options)
                raise SettingsError(f"unknown key {key!r} in {path}{hint}")
            values[name] = self._options[name].from_toml(value, f"{key} in {path}")
        return values, tables

    def _read_tables(self, group: str, content: object, path: Path) -> dict[str, Settings]:
        """The tables [GROUP.NAME] of a file, by name. Raises SettingsError."""
        known = self._tables[group]
        if not isinstance(content, dict):
            raise SettingsError(f"{group} in {path} is no table; [{group}.NAME] is expected")
        found: dict[str, Settings] = {}
        for table, keys in content.items():
            where = f"[{group}.{table}] of {path}"
            if not isinstance(keys, dict):
                raise SettingsError(f"{where} is {keys!r}; a table is expected")
            values: dict[str, Value] = {}
            for key, value in keys.items():
                name = key.replace("-", "_")
                name = self._aliases.get(name, name)
                if name not in known and name in self._options:
                    raise SettingsError(f"{key} in {where} is a setting of all models together")
                if name not in known:
                    raise SettingsError(f"unknown key {key!r} in {where}{_key_hint(name, known)}")
                values[name] = known[name].from_toml(value, f"{key} in {where}")
            found[table] = Settings(values)
        return found

    def _hint(self, word: str) -> str:
        name = _option_name(word)
        if name in NEEDLESS:
            return f"; it is not needed: {NEEDLESS[name]}"
        for option in self._options.values():
            if name in option.elsewhere:
                flag = option.flag
                is_negative = option.name.startswith(_NEGATIONS)
                if option.is_switch and name.startswith(_NEGATIONS) and not is_negative:
                    flag = f"--no-{flag.removeprefix('--')}"
                return f"; its name in weft is {flag}"
        hint = did_you_mean(name.removeprefix("no_"), [*self._options, "config", "help"])
        return (
            hint.replace("mean ", "mean --").replace("_", "-")
            or f"; {self._name} --help all lists the options"
        )

    def _normalized(self, argv: Sequence[str]) -> list[str]:
        """`argv` with every form of a switch as `--flag=word`, and underscores in flags as
        dashes."""
        switches = {option.flag for option in self._options.values() if option.is_switch}
        several = {option.flag for option in self._options.values() if option.several}
        words: list[str] = []
        pending = list(argv)
        while pending:
            word = pending.pop(0)
            if word == "--":
                return [*words, word, *pending]
            flag, equals, text = word.partition("=")
            if flag.startswith("--"):
                flag = flag.replace("_", "-")
                name = flag[2:].replace("-", "_")
                if name in self._aliases:
                    flag = self._options[self._aliases[name]].flag
            if not equals and flag in switches:
                follows = bool(pending) and pending[0].lower() in SWITCH_WORDS
                equals = "="
                text = "on"
                if follows:
                    text = pending.pop(0)
            elif not equals and flag.startswith("--no-") and "--" + flag[5:] in switches:
                flag = "--" + flag[5:]
                equals = "="
                text = "off"
            elif flag in several:
                lines = [text] if equals else [pending.pop(0)] if pending else []
                # A word without a sign of an item is another argument.
                while pending and not pending[0].startswith("-") and _is_item(pending[0]):
                    lines.append(pending.pop(0))
                equals = "=" if lines else ""
                text = "\n".join(lines)
            words.append(flag + equals + text)
        return words

    def _parser(self, shown: set[str]) -> argparse.ArgumentParser:
        usage = (
            f"{self._name} [{self._positional.upper()}] [options]"
            if self._positional
            else f"{self._name} [options]"
        )
        example = next(one for name, one in self._options.items() if name != self._positional)
        variable = f"an environment variable ({example.env}) and " if self._has_variables else ""
        epilog = (
            f"All options: --help all; one group: --help and its name "
            f"({', '.join(self.groups)}). Each option is also {variable}a key of the TOML "
            f"file that --config names ({example.name} = ...)."
        )
        parser = _OptionParser(
            usage=usage,
            description=self._about,
            epilog=epilog,
            add_help=False,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(
                prog, max_help_position=30, width=110
            ),
        )
        if self._positional:
            text = self._options[self._positional].help
            parser.add_argument(
                "positional",
                nargs="*" if self._takes_several else "?",
                metavar=self._positional.upper(),
                help=text,
            )
        groups = {name: parser.add_argument_group(name) for name in self.groups}
        for option in self._options.values():
            text = argparse.SUPPRESS
            if option.name in shown and option.name != self._positional:
                text = _described(option)
            groups[option.group].add_argument(
                option.flag,
                metavar=_metavar(option),
                help=text,
                action="append" if option.several else "store",
            )
        parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
        return parser


def _key_hint(name: str, known: Mapping[str, Option]) -> str:
    """What an unknown key of a file is called in weft, or a known one that is written alike."""
    for option in known.values():
        if name in option.elsewhere:
            return f"; its name in weft is {option.name}"
    return did_you_mean(name, known)


def _is_service_link(variable: str, text: str) -> bool:
    """Whether Kubernetes has set this variable: it gives each pod WEFT_PORT=tcp://10.0.0.1:80 for a
    service named "weft"."""
    return variable.endswith("_PORT") and text.startswith(("tcp://", "udp://", "sctp://"))


def _is_item(word: str) -> bool:
    """Whether a word of the command line is a further item of the list before it."""
    return "=" in word or word.startswith("{") or "://" in word or word.isdecimal()


def _metavar(option: Option) -> str:
    if option.is_switch:
        return "on|off"
    if option.choices:
        return "|".join(option.choices)
    return {int: "N", float: "X", str: "TEXT"}[type(option.default)]


def _described(option: Option) -> str:
    default = option.default
    if isinstance(option.default, bool):
        default = {True: "on", False: "off"}[option.default]
    text = option.help
    if default not in ("", 0, None):
        text += f" [{default}]"
    return text.replace("%", "%%")
