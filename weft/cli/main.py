"""The command `weft`: finds the verb, runs it, and turns errors that the user can fix into one
paragraph and exit status 2.

Every verb is in a module of its own that is imported only when it runs, so that help is fast.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence

from weft.config.environment import warn_of_variables
from weft.config.model_errors import ModelError
from weft.config.options import SettingsError, as_written, did_you_mean

VERBS = {
    "serve": (
        "weft.launch.serve:serve",
        "serve a model over HTTP (OpenAI API, native API, metrics)",
    ),
    "route": (
        "weft.launch.route:route",
        "a front that forwards each request to one of several servers",
    ),
    "chat": ("weft.cli.chat:chat", "chat in the terminal, with a model or with a running server"),
    "launch": (
        "weft.cli.agents.launch:launch",
        "start a coding agent against a running server",
    ),
    "pull": ("weft.cli.store.pull:pull", "fetch a model of the Hugging Face hub"),
    "list": ("weft.cli.store.list:list_models", "list the models of this machine"),
    "show": ("weft.cli.store.show:show", "show what a model is, without loading it"),
    "rm": ("weft.cli.store.rm:rm", "remove a model, or the weights cache"),
    "cp": ("weft.cli.store.cp:cp", "copy a model to another name"),
    "generate": (
        "weft.cli.generate:generate",
        "complete prompts without a server, from a file or the command line",
    ),
    "batch": (
        "weft.cli.batch:batch",
        "answer the lines of a file by a running server, in the background",
    ),
    "sim": (
        "weft.cli.sim:sim",
        "try policies and settings on a trace of requests, in virtual time",
    ),
    "plan": (
        "weft.cli.capacity.plan:plan",
        "how many users this machine serves, and with which settings",
    ),
    "tune": (
        "weft.cli.capacity.tune:tune",
        "which settings of a running server should change, and change them",
    ),
    "bench": (
        "weft.cli.bench:bench",
        "measure a model, a server, the scheduler, what fewer bits cost, predictions",
    ),
    "ctl": (
        "weft.cli.ctl.run:ctl",
        "control a running server: flush, pause, profile, settings, requests",
    ),
    "ps": ("weft.cli.ps:ps", "the models that a running server has in memory"),
    "replay": (
        "weft.cli.replay:replay",
        "run the scheduler over a journal, and compare every decision",
    ),
    "doctor": (
        "weft.cli.doctor:doctor",
        "check this machine, this installation, and a model, without loading it",
    ),
    "completion": (
        "weft.cli.completion:completion",
        "print a script that completes commands in bash, zsh or fish",
    ),
    "version": ("weft.cli.main:version", "print the version"),
}

# What users of other engines type -> what weft has in its place.
ELSEWHERE = {
    "ls": "weft list shows the models of this machine",
    "remove": "weft rm removes a model",
    "download": "weft pull fetches a model",
    "run": "weft chat MODEL chats, weft generate completes, weft serve MODEL serves",
    "stop": "Ctrl-C or SIGTERM stops weft serve; weft ctl abort ends requests",
    "start": "weft serve starts a server",
    "server": "weft serve starts a server",
    "complete": "weft generate completes prompts",
    "run-batch": "weft batch run FILE answers the lines of a file",
    "logs": "weft serve writes its log to standard error",
}

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# numpy's library of products starts threads when it is imported, which spin for 45 ms of a
# processor; weft has none for them to do. Elsewhere torch may use the same library.
NUMPY_THREADS = "OPENBLAS_NUM_THREADS"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `weft` with `argv` (None: the process's arguments). Returns the exit status."""
    _prepare_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"] and words[1:2] and words[1] in VERBS:
        words = [words[1], "--help", *words[2:]]  # weft help serve memory
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except (SettingsError, ModelError) as exc:
        if _wants_traceback(words):
            traceback.print_exc()
        from weft.config.engine import EngineConfig

        print(f"weft: {as_written(str(exc), words, EngineConfig)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it: weft --help | head
        _drop_output()
        return EXIT_FAILED
    except MemoryError as exc:
        print(f"weft: there is not enough memory: {exc}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as exc:
        if exc.errno not in DISK_FAULTS:
            raise
        print(f"weft: a file cannot be read or written: {exc.strerror}", file=sys.stderr)
        _drop_output()
        return EXIT_FAILED


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        return version([])
    if words[0] == "help":
        return show_topic(words[1:])
    if words[0] not in VERBS:
        raise SettingsError(_no_verb(words[0]))
    warn_of_variables(os.environ)
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ.setdefault(NUMPY_THREADS, "1")
    return _verb(words[0])(words[1:])


def _prepare_streams() -> None:
    """Let each standard stream be there, though it was closed, and take every character, though its
    encoding lacks some."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Let the end of the process write nothing more of its output, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def version(argv: Sequence[str]) -> int:
    from weft.version import __version__

    print(f"weft {__version__}")
    return 0


def show_topic(argv: Sequence[str]) -> int:
    """`weft help`, or `weft help TOPIC`. Raises SettingsError for another topic."""
    from weft.cli.topics import TOPICS, topic, topics

    if not argv:
        print(f"{_help()}\n\nweft help TOPIC answers a question:\n\n{topics()}")
        return 0
    if argv[0] not in TOPICS:
        hint = did_you_mean(argv[0], [*VERBS, *TOPICS])
        raise SettingsError(f"there is no help on {argv[0]!r}{hint} (weft help lists the topics)")
    print(topic(argv[0]))
    return 0


def _no_verb(word: str) -> str:
    hint = did_you_mean(word, VERBS)
    if word in ELSEWHERE:
        hint = f": {ELSEWHERE[word]}"
    return f"there is no command {word!r}{hint} (weft --help lists them)"


def _verb(name: str) -> Callable[[Sequence[str]], int]:
    module, _, function = VERBS[name][0].partition(":")
    verb: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    return verb


def _help() -> str:
    lines = [f"  {name:10} {about}" for name, (_, about) in VERBS.items()]
    return "\n".join(
        [
            "usage: weft COMMAND [options]",
            "",
            "A serving engine for large language models.",
            "",
            *lines,
            "",
            "weft COMMAND --help tells more, weft help answers questions. To begin: weft serve",
        ]
    )


def _wants_traceback(words: Sequence[str]) -> bool:
    level = os.environ.get("WEFT_LOG_LEVEL", "")
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, _, text = word.partition("=")
        if flag in ("--log-level", "--log_level"):
            level = text or following
    return level == "debug"
