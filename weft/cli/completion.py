"""`weft completion SHELL`: a script that completes commands, options and their values in bash, zsh
or fish.

What can be completed is read from the help of each command, so a new option or verb needs nothing
here. Knows no shell but the three writers at the end.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.config.options import SettingsError

# An option at the start of a line of help, and its choices, if it has some.
_OPTION = re.compile(
    r"^  (--[a-z][\w-]*)(?: ([a-z0-9_.-]+(?:\|[a-z0-9_.-]+)+)(?=\s|$))?", re.MULTILINE
)
WITHOUT_OPTIONS = ("ctl", "version", "completion", "bench")  # those of ctl belong to its commands


@dataclass
class Following:
    """Further words that may come next, and options with the values of each (none: any text)."""

    words: list[str] = field(default_factory=list)
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)


Tree = Mapping[tuple[str, ...], Following]


def completion(argv: Sequence[str]) -> int:
    """Print the script for the shell that `argv` names. Returns the exit status. Raises
    SettingsError for another shell."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    if argv[0] not in SHELLS:
        raise SettingsError(f"there is no completion for {argv[0]!r}: {', '.join(SHELLS)}")
    if len(argv) > 1:
        raise SettingsError(f"unexpected argument {argv[1]!r}")
    print(SHELLS[argv[0]](tree()))
    return 0


def _help() -> str:
    return "\n".join(
        [
            f"usage: weft completion {'|'.join(SHELLS)}",
            "",
            "Print a script that completes commands, options and their values.",
            "",
            "  bash  weft completion bash > ~/.local/share/bash-completion/completions/weft",
            "  zsh   weft completion zsh > DIR/_weft, where DIR is in fpath before compinit",
            "  fish  weft completion fish > ~/.config/fish/completions/weft.fish",
        ]
    )


# ---- what can be completed


def tree() -> Tree:
    """By the words before it, what may follow. () is `weft` itself."""
    from weft.cli.bench import BENCHES
    from weft.cli.ctl.command import arguments_of
    from weft.cli.ctl.run import other_commands
    from weft.cli.ctl.table import COMMANDS
    from weft.cli.main import VERBS
    from weft.cli.topics import TOPICS

    nodes: dict[tuple[str, ...], Following] = {
        (): Following([*VERBS, "help"], {"--help": (), "--version": ()})
    }
    for verb in VERBS:
        nodes[verb,] = Following()
        if verb not in WITHOUT_OPTIONS:
            nodes[verb,].options = _options_of(verb, "--help", "all")
    nodes["help",] = Following([*VERBS, *TOPICS])
    nodes["completion",].words = [*SHELLS]
    nodes["batch",].words = ["run"]
    nodes["bench",].words = [*BENCHES]
    for name in BENCHES:
        nodes["bench", name] = Following(options=_options_of("bench", name, "--help", "all"))
    common: dict[str, tuple[str, ...]]
    common = dict.fromkeys(("--url", "--admin-key", "--model", "--json", "--help"), ())
    for command in [*COMMANDS, *other_commands()]:
        words = ("ctl", *command.words.split())
        _add_words(nodes, words)
        own = [one.name for one in arguments_of(command) if one.name.startswith("--")]
        nodes[words].options = {**common, **dict.fromkeys(own, ())}
    return nodes


def _add_words(nodes: dict[tuple[str, ...], Following], words: tuple[str, ...]) -> None:
    """Make each word lead to the next."""
    for end in range(1, len(words)):
        following = nodes[words[:end]].words
        if words[end] not in following:
            following.append(words[end])
        nodes.setdefault(words[: end + 1], Following())


def _options_of(*argv: str) -> dict[str, tuple[str, ...]]:
    """The options in the help of a command, and the values of those that have a choice."""
    from weft.cli.main import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(argv)
    found: dict[str, tuple[str, ...]] = {"--help": ()}
    for name, values in _OPTION.findall(printed.getvalue()):
        found[name] = tuple(values.split("|")) if values else ()
        if found[name] == ("on", "off"):
            found[f"--no-{name.removeprefix('--')}"] = ()
    return found


# ---- the shells


def _paths(nodes: Tree) -> Iterator[str]:
    for words in nodes:
        if words:
            yield " ".join(words)


def _cases(
    nodes: Tree, of_values: Callable[[str], str], of_words: Callable[[str], str]
) -> list[str]:
    """The lines of two `case` commands of bash and zsh: over `$typed` with the last word, then over
    `$typed` alone."""
    lines = ['    case "$typed $last" in']
    for words, node in nodes.items():
        by_values: dict[tuple[str, ...], list[str]] = {}
        for name, values in node.options.items():
            if values:
                by_values.setdefault(values, []).append(shlex.quote(" ".join((*words, name))))
        for values, names in by_values.items():
            lines.append(f"        {'|'.join(names)}) {of_values(' '.join(values))} ;;")
    lines += ["    esac", '    case "$typed" in']
    for words, node in nodes.items():
        follow = of_words(" ".join([*node.words, *node.options]))
        lines.append(f"        {shlex.quote(' '.join(words))}) {follow} ;;")
    return [*lines, "    esac"]


def _steps(nodes: Tree, words: str) -> list[str]:
    """The lines of bash and zsh that find the command among the words before the cursor."""
    known = "|".join(shlex.quote(path) for path in _paths(nodes))
    return [
        f"    for one in {words}; do",
        '        case "${typed:+$typed }$one" in',
        f'            {known}) typed="${{typed:+$typed }}$one" ;;',
        "        esac",
        "    done",
    ]


def bash(nodes: Tree) -> str:
    return "\n".join(
        [
            "# Completion of weft for bash, written by: weft completion bash",
            "_weft() {",
            '    local word="${COMP_WORDS[COMP_CWORD]}" last="${COMP_WORDS[COMP_CWORD-1]}"',
            '    local typed="" one',
            *_steps(nodes, '"${COMP_WORDS[@]:1:COMP_CWORD-1}"'),
            *_cases(
                nodes,
                lambda values: f'COMPREPLY=($(compgen -W "{values}" -- "$word")); return',
                lambda words: f'COMPREPLY=($(compgen -W "{words}" -- "$word"))',
            ),
            "}",
            "complete -o default -F _weft weft",
        ]
    )


def zsh(nodes: Tree) -> str:
    return "\n".join(
        [
            "#compdef weft",
            "# Completion of weft for zsh, written by: weft completion zsh",
            "_weft() {",
            '    local last="${words[CURRENT-1]}" typed="" one',
            *_steps(nodes, '"${(@)words[2,CURRENT-1]}"'),
            *_cases(
                nodes,
                lambda values: f"compadd -- {values}; return",
                lambda words: f"compadd -- {words}",
            ),
            "    _files",
            "}",
            '[ "$funcstack[1]" = _weft ] && _weft "$@" || compdef _weft weft',
        ]
    )


def fish(nodes: Tree) -> str:
    lines = [
        "# Completion of weft for fish, written by: weft completion fish",
        "function __weft_at",
        '    set -l typed ""',
        "    for one in (commandline -opc)[2..-1]",
        '        switch (string trim "$typed $one")',
        f"            case {' '.join(shlex.quote(path) for path in _paths(nodes))}",
        '                set typed (string trim "$typed $one")',
        "        end",
        "    end",
        '    test "$typed" = "$argv"',
        "end",
    ]
    for words, node in nodes.items():
        start = f"complete -c weft -n {shlex.quote('__weft_at ' + shlex.quote(' '.join(words)))}"
        if node.words:
            lines.append(f"{start} -a {shlex.quote(' '.join(node.words))}")
        for name, values in node.options.items():
            choice = f" -x -a {shlex.quote(' '.join(values))}" if values else ""
            lines.append(f"{start} -l {name.removeprefix('--')}{choice}")
    return "\n".join(lines)


SHELLS: Mapping[str, Callable[[Tree], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
