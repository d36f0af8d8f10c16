"""Finds the texts of all errors that end a command or answer a request, in the sources: what is given to the classes
below, to classes made of them, and to functions that return them; and what functions return that are named there. A part that is put in when an error happens is `...`.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

# What ends a command of the terminal with one paragraph, and what answers a request (server/errors.py::translated).
OF_COMMANDS = ("SettingsError", "ModelError", "TokenizerError")
OF_REQUESTS = (
    "ApiError",
    "InvalidParam",
    "MediaError",
    "InvalidGrammar",
    "ContextExceeded",
    "BatchRefused",
    "FileNotStored",
    "EngineUnavailable",
    "EngineFault",
    "StateError",
    "Busy",
    "Refusal",
    "TurnRefused",
    "AdapterRefused",
    "Finish",
    "ControlReply",
    "DeviceReply",
    "Abort",
    "BadLine",
)
# Why an engine, a node or a server takes no requests any more.
OF_ENDS = (
    "_find_hang",
    "explain_exit",
    "explain_end",
    "_why_stopped",
    "ExitStatus",
    "EngineFailed",
    "EngineBroken",
    "NodeEnd",
    "RankLost",
    "end_all",
    "_drop_requests",
    "tell_end",
    "leave",
    "lose",
    "_replace",
)
# The classes of the errors that the others put in, and of those that Python code gets.
OF_PARTS = ("Exception", "ValueError", "TypeError", "RuntimeError", "OSError", "ImportError")
# Texts of the same classes and functions that tell of no error.
NO_ERRORS = (
    "a stop string was found",
    "stopped; the same command goes on",
    "its memory was needed",
    "generation is paused",
    "all engines meet at the same step",
    "weights or memory are being changed",
)
# Functions that have the name of one that makes errors, and make none.
NO_MAKERS = ("note",)
GAP = "..."
NO_CONSTANTS: Mapping[str, ast.expr] = {}


class ErrorText(NamedTuple):
    text: str
    statuses: tuple[int, ...]  # of the answer, where they stand beside the text
    module: str  # below weft/, as server/limits


class _Function(NamedTuple):
    name: str  # "" for the constants of a module
    nodes: list[ast.AST]  # assignments, calls and returns, the outer ones first
    called: frozenset[str]  # the names of what is called


class _Source(NamedTuple):
    module: str
    bases: list[tuple[str, list[str]]]  # the name of each class, and those of what it is made of
    returned: list[tuple[str, str]]  # the names of functions, and of the classes that they return
    functions: list[_Function]
    written: dict[str, list[str]]  # the texts that each function returns


def texts(package: Path, roots: tuple[str, ...], others: tuple[str, ...] = ()) -> list[ErrorText]:
    """The texts of errors of the classes `roots`, without those of the classes `others`, by module
    and then in the order of the source."""
    sources = _sources(package)
    makers = _makers(sources, roots) - _makers(sources, others)
    anywhere: dict[str, list[str]] = {}
    for source in sources:
        anywhere |= source.written
    found: dict[tuple[str, str], ErrorText] = {}
    for source in sources:
        own = source.written
        written = anywhere | own
        for one in (text for name in roots for text in own.get(name, []) if " " in text):
            found.setdefault((source.module, one), ErrorText(one, (), source.module))
        constants = _constants(source.functions[0].nodes)
        used_here = _used_here(source, makers, roots)
        for function in source.functions:
            if function.called.isdisjoint(used_here):
                continue
            for one in _of_function(function.nodes, used_here, written, constants):
                if one.text in NO_ERRORS:
                    continue
                key = (source.module, one.text)
                before = found.get(key, one).statuses
                statuses = tuple(sorted({*before, *one.statuses}))
                found[key] = ErrorText(one.text, statuses, source.module)
    return list(found.values())


@cache
def _sources(package: Path) -> list[_Source]:
    return [
        _read(str(path.relative_to(package).with_suffix("")), ast.parse(path.read_text("utf-8")))
        for path in sorted(package.rglob("*.py"))
    ]


def _read(module: str, tree: ast.Module) -> _Source:
    constants = ast.Module([node for node in tree.body if isinstance(node, ast.Assign)], [])
    source = _Source(module, [], [], [_function("", constants)], {})
    for node in _statements(tree):
        if isinstance(node, ast.ClassDef):
            source.bases.append((node.name, [_name(base) for base in node.bases]))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_plain = isinstance(node, ast.FunctionDef)
            source.functions.append(_function(node.name if is_plain else "", node))
            if is_plain and node.returns:
                source.returned.append((node.name, _name(node.returns)))
    source.written.update(_returned(source.functions))
    return source


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, but without expressions, which define nothing."""
    todo = deque([tree])
    while todo:
        node = todo.popleft()
        yield node
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            todo += getattr(node, name, [])


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, in less time: without what has no texts."""
    todo = deque([tree])
    while todo:
        node = todo.popleft()
        yield node
        for name in _parts(type(node)):
            value = getattr(node, name, None)
            if isinstance(value, list):
                todo += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST):
                todo.append(value)


@cache
def _parts(kind: type[ast.AST]) -> tuple[str, ...]:
    """The fields of nodes of a kind that may hold nodes with texts."""
    if issubclass(kind, (ast.Name, ast.Constant)):
        return ()
    return tuple(name for name in kind._fields if name not in ("ctx", "op"))


def _function(name: str, tree: ast.AST) -> _Function:
    nodes = [node for node in _walk(tree) if isinstance(node, (ast.Assign, ast.Call, ast.Return))]
    called = frozenset(_name(node.func) for node in nodes if isinstance(node, ast.Call))
    return _Function(name, nodes, called)


def _makers(sources: list[_Source], roots: tuple[str, ...]) -> set[str]:
    """The names of the classes, of classes made of them, and of functions that return one."""
    classes = set(roots)
    before = 0
    while len(classes) > before:
        before = len(classes)
        for source in sources:
            classes |= {name for name, bases in source.bases if not classes.isdisjoint(bases)}
    returned = [one for source in sources for one in source.returned]
    return classes | {name for name, kind in returned if kind in classes}


def _used_here(source: _Source, makers: set[str], roots: tuple[str, ...]) -> set[str]:
    """Those of `makers` that make errors in this module: a function of the module has the name of a
    maker elsewhere, and a private name is that of the module's own function."""
    own = {function.name for function in source.functions}
    own_makers = {name for name, _ in source.bases}
    own_makers |= {name for name, kind in source.returned if kind in makers or name in roots}
    used: set[str] = set()
    for name in makers:
        is_elsewhere = name not in own and not name.startswith("_") and name not in NO_MAKERS
        if name in roots or name in own_makers or is_elsewhere:
            used.add(name)
    return used


def _returned(functions: list[_Function]) -> dict[str, list[str]]:
    """By the name of each function of a module, the texts that it returns: others write the whole
    message of an error."""
    found: dict[str, list[str]] = {}
    for name, nodes, _ in functions:
        if name:
            returns = [node.value for node in nodes if isinstance(node, ast.Return)]
            found[name] = [_text(one, {}) for one in returns if one is not None]
    return found


def _constants(nodes: list[ast.AST]) -> dict[str, ast.expr]:
    """The texts without gaps among the constants of a module, by their names."""
    found: dict[str, ast.expr] = {}
    for node in nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.targets[0], ast.Name) and isinstance(node.value.value, str):
            found[node.targets[0].id] = node.value
    return found


def _of_function(
    nodes: list[ast.AST],
    makers: set[str],
    written: Mapping[str, list[str]],
    constants: Mapping[str, ast.expr],
) -> Iterator[ErrorText]:
    calls = [node for node in nodes if isinstance(node, ast.Call) and _name(node.func) in makers]
    variables = _variables(nodes, calls)
    for node in calls:
        given = [
            *node.args,
            *(one.value for one in node.keywords if one.arg in ("message", "reason")),
        ]
        for one in given:
            if isinstance(one, ast.Call) and _name(one.func) not in makers:
                texts_of = [text for text in written.get(_name(one.func), []) if " " in text]
                yield from (ErrorText(text, (), "") for text in texts_of)
        # The text has spaces; other arguments are names of fields and numbers.
        candidates = [_texts_of(one, variables, constants) for one in given]
        candidates = [[text for text in one if " " in text.strip(". ")] for one in candidates]
        best = max(candidates, key=lambda one: max(map(len, one), default=0), default=[])
        constant = [one.value for one in given if isinstance(one, ast.Constant)]
        constant += [
            one.value.value for one in node.keywords if isinstance(one.value, ast.Constant)
        ]
        statuses = tuple(one for one in constant if isinstance(one, int) and 400 <= one < 600)
        yield from (ErrorText(text, statuses[:1], "") for text in best)


def _variables(nodes: list[ast.AST], calls: list[ast.Call]) -> dict[ast.Name, list[ast.expr]]:
    """What each variable in the arguments of `calls` may be: all that was assigned to it since the
    call before that took it. Texts only."""
    assigned: dict[str, list[tuple[int, ast.expr]]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = _text(node.value, {})
            if text.replace(GAP, "").strip(" :'"):
                assigned.setdefault(node.targets[0].id, []).append((node.lineno, node.value))
    found: dict[ast.Name, list[ast.expr]] = {}
    last_use: dict[str, int] = {}
    for call in sorted(calls, key=lambda call: call.lineno):
        for one in ast.walk(call):
            if isinstance(one, ast.Name) and one.id in assigned:
                before = [pair for pair in assigned[one.id] if pair[0] < call.lineno]
                since = [pair for pair in before if pair[0] > last_use.get(one.id, 0)]
                found[one] = [value for _, value in since or before[-1:]]
        for name in {one.id for one in ast.walk(call) if isinstance(one, ast.Name)}:
            last_use[name] = call.lineno
    return found


def _texts_of(
    node: ast.expr,
    variables: Mapping[ast.Name, list[ast.expr]],
    constants: Mapping[str, ast.expr],
) -> list[str]:
    """The texts that an argument may be; empty if it is none."""
    if isinstance(node, ast.Name):
        return [_text(value, {}, constants) for value in variables.get(node, [])]
    last = {one.id: values[-1] for one, values in variables.items() if values}
    return [_text(node, last, constants)]


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def _text(
    node: ast.expr,
    assigned: Mapping[str, ast.expr],
    constants: Mapping[str, ast.expr] = NO_CONSTANTS,
) -> str:
    """A text of the source with gaps, or "" if this is none. What an f-string puts in is a gap,
    unless it is one of the `constants`."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = []
        for one in node.values:
            filled = one.value if isinstance(one, ast.FormattedValue) else one
            parts.append(_text(filled, constants) or GAP)
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_text(side, assigned, constants) or GAP for side in (node.left, node.right)]
        return "".join(sides)
    if isinstance(node, ast.Name) and node.id in assigned:
        return _text(assigned[node.id], {}, constants)
    return ""


class Group(NamedTuple):
    """Errors of some modules: what they have in common, and what helps."""

    title: str
    helps: str
    modules: tuple[str, ...]  # beginnings of their names


GROUPS_OF_COMMANDS = (
    Group(
        "Options and settings",
        "Most name the option, its value and what is allowed; `weft serve --help all` has the options, and a value may also come from a variable `WEFT_...` or from `--config`.",
        (
            "config/options",
            "config/nodes",
            "config/parallel",
            "config/pairs",
            "config/lockstep",
            "config/resolve",
            "config/sizing",
            "config/draft",
            "config/speculative",
            "config/cache",
            "config/relay",
            "config/lenders",
            "config/kv_",
            "config/handoff",
            "config/adapters",
            "config/plugins",
            "config/media_options",
            "config/encoder",
            "assemble/",
            "config/json_object",
            "config/generation",
        ),
    ),
    Group(
        "Models: their `config.json` and their files",
        "`weft doctor MODEL` reads the same files without loading them. A model of another architecture can run by the code of transformers ([how](../guides/transformers.md)); a file that is cut off or damaged must be fetched anew (`weft rm`, `weft pull`).",
        (
            "config/",
            "weights/",
            "models/",
            "store/",
            "text/",
            "executor/",
            "executor/weights",
            "executor/plain",
        ),
    ),
    Group(
        "The machine: processor, GPU, memory, ranks",
        "`weft doctor` says what this machine has and what it lacks.",
        ("config/gpu", "executor/cpu", "executor/gpu", "executor/ranks"),
    ),
    Group(
        "Adapters",
        "[Adapters](../guides/adapters.md) says which files are read. An adapter of `--lora-paths` that cannot be loaded keeps the server from starting; later a server goes on without the adapter, and answers with the text.",
        ("executor/lora", "engine/adapters"),
    ),
    Group(
        "Your own code: plugins, logit processors, policies, groups, Ray",
        "[Outside of the tree](../contribute/outside.md) has the protocol of each part, [logit processors](../guides/logit-processors.md) theirs.",
        (
            "executor/logit_processors",
            "executor/outside",
            "scheduler/",
            "server/plugins",
            "launch/ray",
            "engine/",
        ),
    ),
    Group(
        "Starting a server",
        "[Troubleshooting](../guides/troubleshooting.md) has the frequent ones.",
        ("launch/", "observe/", "kv_events/", "server/"),
    ),
    Group(
        "Commands of the terminal",
        "`weft COMMAND --help` says what a command takes.",
        (
            *("cli/", "bench/", "sim/", "capacity/", "batches/", "llm", "own_engine"),
            "client/prompt_reader",
        ),
    ),
)
GROUPS_OF_REQUESTS = (
    Group(
        "Keys, hosts and origins",
        "[Security](../guides/security.md) says who may ask what, [proxies](../guides/proxies.md) what a proxy must pass on.",
        ("server/auth", "server/page"),
    ),
    Group(
        "Limits, time and load",
        "An answer with 503 or 429 has `Retry-After`; [limits](limits.md) has each limit with its option.",
        (
            "server/limits",
            "server/body",
            "server/operation",
            "server/http",
            "server/health",
            "text/turns",
            "launch/",
            "server/errors",
            "scheduler/limits",
            "engine/deadline",
            "engine/device_jobs",
            "engine/guard",
            "client/deliveries",
            "client/fleet",
            "client/client",
            "client/engine_state",
            "client/calls",
        ),
    ),
    Group(
        "Models and their names",
        "`GET /v1/models` lists the names.",
        (
            "server/model_names",
            "server/aliases",
            "server/several",
            "server/ollama",
            "relay/",
        ),
    ),
    Group(
        "Python: `weft.LLM`",
        "Raised in the program's own process. [Python](python.md) has the methods.",
        ("llm", "own_engine"),
    ),
    Group(
        "Fields of a request",
        "`param` names the field if it is known, in answers of OpenAI's form. [Fields of requests](../guides/api-fields.md) says what each takes.",
        (
            "server/",
            "server/fields",
            "server/requests",
            "server/tokens",
            "server/infill",
            "client/",
            "messages/",
            "server/sglang",
            "scheduler/",
            "client/adapters",
        ),
    ),
    Group(
        "Messages, tools and chat templates",
        "[Tool calls](../guides/tools.md) and [the APIs](../guides/apis.md) say what is read.",
        (
            "server/chat",
            "server/openai",
            "server/anthropic",
            "text/templates",
            "text/tokenizer",
        ),
    ),
    Group(
        "Pictures, videos and sounds",
        "[Images, videos and sounds](../guides/media.md) has the formats, the sizes and the hosts that may be named.",
        ("text/media", "server/media"),
    ),
    Group(
        "Structured output",
        "[Structured output](../guides/structured-output.md) has what schemas, patterns and grammars may contain.",
        ("grammar/", "engine/grammar"),
    ),
    Group(
        "Vectors, scores and classes",
        "[Embeddings](../guides/embeddings.md) has the inputs of each route.",
        ("server/pooling",),
    ),
    Group(
        "Batches and stored answers",
        "[Batches](../guides/batches.md) and [state](../guides/state.md).",
        ("batches/", "state/", "cli/batch", "cli/generate"),
    ),
    Group(
        "Administration",
        "[Control requests](../guides/control.md) says what each route takes, and which key it needs.",
        ("server/admin", "assemble/", "engine/", "executor/", "plan/", "cli/"),
    ),
)

GROUPS_OF_ENDS = (
    Group(
        "The engine",
        "The log has it as the `reason` of `engine_hangs` or `engine_lost`; answers with 503 have it, an end behind `the engine has stopped:`, or `engine N has stopped:` with `--dp-size`. [Health](../guides/observability.md#health-and-an-engine-that-hangs) says what follows.",
        ("client/", "engine/", "launch/"),
    ),
    Group(
        "Ranks and nodes",
        "An engine ends when one of its ranks or nodes is lost, and one of these is why. [One model in several processes](../guides/parallel.md) says what they need.",
        ("assemble/", "executor/", "launch/node", "ops/", "parallel/"),
    ),
)
GROUPS_OF_PARTS = (
    Group(
        "By module",
        "Each stands where an error above has `...`, in a line of the log, in what `weft doctor` says, or is raised by a class that a program uses without a server.",
        ("",),
    ),
)


def page(package: Path) -> Iterator[str]:
    """The lines of docs/reference/errors.md."""
    yield from [
        "# Errors",
        "",
        "<!-- Written by docs/generate/references.py: change the code, not this page. -->",
        "",
    ]
    yield "Texts with which commands end and requests are answered, as a program finds them in the sources: of some only a part, and not those that"
    yield "libraries write. `...` is what is put in: a name, a value, what is allowed. A status is given where the source has it"
    yield "beside the text. Some of those that end a command also answer a request that does the same: an adapter, new weights, a pull."
    yield "Search for a few words of your error. [Troubleshooting](../guides/troubleshooting.md) explains the frequent ones."
    known: tuple[str, ...] = ()
    for title, roots, groups in (
        ("Errors that end a command", OF_COMMANDS, GROUPS_OF_COMMANDS),
        ("Errors that answer or end a request", OF_REQUESTS, GROUPS_OF_REQUESTS),
        ("Why an engine or a server has ended", OF_ENDS, GROUPS_OF_ENDS),
        ("What errors put in", OF_PARTS, GROUPS_OF_PARTS),
    ):
        yield from ["", f"## {title}"]
        found = texts(package, roots, known if roots is OF_PARTS else ())
        known += roots
        by_group = {
            group: [one for one in found if _group_of(one, groups) is group] for group in groups
        }
        for group, errors in by_group.items():
            yield from ["", f"### {group.title}", "", group.helps, ""]
            yield from ["| error | where it is made |", "|---|---|"]
            for error in errors:
                statuses = " or ".join(map(str, error.statuses))
                status = f", status {statuses}" if statuses else ""
                yield f"| {_cell(error.text)} | `{error.module}`{status} |"


def _group_of(error: ErrorText, groups: tuple[Group, ...]) -> Group:
    """The group that has the longest beginning of its module. Raises ValueError if none has one."""
    fits = [
        (len(start), group)
        for group in groups
        for start in group.modules
        if error.module.startswith(start)
    ]
    if not fits:
        raise ValueError(f"{error.module} is in no group of docs/generate/errors.py: {error.text}")
    return max(fits, key=lambda fit: fit[0])[1]


def _cell(text: str) -> str:
    """A text in a cell of a table."""
    words = " ".join(text.split())
    return (
        words.replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("*", "\\*")
        .replace("[", "\\[")
        .replace("_", "\\_")
        .replace("`", "\\`")
    )
