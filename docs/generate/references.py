"""Writes the reference pages from the code: the command line from the options, HTTP from the OpenAPI document, Python
from docstrings, errors from the sources.

    python docs/generate/references.py           writes docs/reference/{command-line,http,python,errors}.md
    python docs/generate/references.py --check   writes nothing; status 1 names the pages that are not up to date
"""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import errors
from generated import write_or_check

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import weft  # noqa: E402
from weft.cli import main as command_line  # noqa: E402
from weft.config.engine import EngineConfig  # noqa: E402
from weft.config.limits import Limits  # noqa: E402
from weft.config.options import Option, options_of  # noqa: E402
from weft.config.server import ServerConfig  # noqa: E402
from weft.config.several import ModelsConfig  # noqa: E402
from weft.server.app import OPERATIONS  # noqa: E402
from weft.server.openapi import openapi_document  # noqa: E402

# The trees of all sources stay until the end: the collector would walk through them again and again.
gc.disable()

PAGES = ROOT / "docs" / "reference"
NOTE = "<!-- Written by docs/generate/references.py: change the code, not this page. -->"
VERBS_WITH_TABLES = {"serve"}
VERBS_WITHOUT_HELP = {"version"}


def page_of_command_line() -> Iterator[str]:
    """`weft serve` as tables, an option a row; the other verbs as they print their help."""
    yield from ["# Command line", "", NOTE, ""]
    yield from ["| command | what it does |", "|---|---|"]
    for verb, (_, about) in command_line.VERBS.items():
        yield f"| `weft {verb}` | {about} |"
    yield from ["", "`weft help` lists topics, and `weft help TOPIC` explains one."]
    yield from ["", "## weft serve", ""]
    yield "`weft serve [MODEL ...] [options]`. Each option is also an environment variable and a key of the TOML file that"
    yield "`--config FILE` names: `--kv-tokens 4096`, `WEFT_KV_TOKENS=4096`, `kv_tokens = 4096`. The command line has"
    yield "precedence over the environment, and the environment over the file. A switch is `--overlap on`, `--overlap off`,"
    yield "`--overlap` or `--no-overlap`. The last column has the names of the same option in other engines;"
    yield "those with the word *taken* may be used here, too."
    options: list[Option] = []
    for config in (EngineConfig, ServerConfig, ModelsConfig, Limits):
        options += options_of(config)
    for group in dict.fromkeys(option.group for option in options):
        yield from [
            "",
            f"### {group}",
            "",
            "| option | default | meaning | elsewhere |",
            "|---|---|---|---|",
        ]
        for option in options:
            if option.group == group:
                yield _option_row(option)
    for verb in command_line.VERBS:
        if verb not in VERBS_WITH_TABLES | VERBS_WITHOUT_HELP:
            yield from ["", f"## weft {verb}", "", "```text", *_help(verb), "```"]


def _option_row(option: Option) -> str:
    same = [f"`{name}` (*taken*)" for name in option.aliases]
    elsewhere = ", ".join([*same, *(f"`{name}`" for name in option.elsewhere)])
    cells = [f"`{option.flag}`", _default(option), _meaning(option), elsewhere]
    return "| " + " | ".join(cells) + " |"


def _default(option: Option) -> str:
    if option.default is None:
        return "by the machine"
    if option.is_switch:
        return "on" if option.default else "off"
    if option.default == "":
        return "none"
    return f"`{option.default}`"


def _meaning(option: Option) -> str:
    meaning = option.help.replace("|", "\\|").replace("<", "&lt;")
    if option.choices:
        meaning += " (" + ", ".join(f"`{choice}`" for choice in option.choices) + ")"
    return meaning


def _help(verb: str) -> list[str]:
    """What `weft VERB --help` prints, on a terminal of 100 columns."""
    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command_line.main([verb, "--help"])
    return printed.getvalue().rstrip().splitlines()


def page_of_http() -> Iterator[str]:
    """A table of all routes, then the fields of each body, and of the objects in bodies."""
    document = openapi_document(OPERATIONS, weft.__version__, Limits())
    schemas = document["components"]["schemas"]
    yield from ["# HTTP", "", NOTE, ""]
    yield "A running server describes the same for programs at `/openapi.json`, with its own limits and the answers of some"
    yield "routes, and lists the routes at `/docs`."
    yield "[The guide to the APIs](../guides/apis.md) explains the fields, and the differences between APIs."
    yield ""
    yield "The greatest values are those of the default [limits](limits.md), which also bound lengths and counts. What the"
    yield "route, the model, an option of the server or another field rules out is refused, too. The default `null` is a field"
    yield "that is left out. Some fields are there only to be refused by name. `/v1/files`, `/v1/audio/transcriptions` and `/v1/audio/translations` take forms with a file:"
    yield "[batches](../guides/batches.md), [speech](../guides/speech.md)."
    yield from ["", "| route | what it does | body |", "|---|---|---|"]
    bodies: dict[str, Any] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = _schema_name(operation.get("requestBody"))
            link = f"[{body}](#{body.lower()})" if body in schemas else ""
            yield f"| `{method.upper()} {path}` | {operation['summary']} | {link} |"
            if body in schemas:
                bodies |= _with_inner(body, schemas)
    for name in sorted(bodies):
        yield from ["", f"## {name}", "", "| field | type | default |", "|---|---|---|"]
        required = bodies[name].get("required", [])
        for field, schema in bodies[name].get("properties", {}).items():
            default = "required" if field in required else f"`{json.dumps(schema.get('default'))}`"
            yield f"| `{field}` | {_type_of(schema)} | {default} |"


def _with_inner(name: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of this name, and of the objects in it, by their names."""
    found: dict[str, Any] = {}
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found[one] = schemas[one]
            waiting += re.findall(r"'#/components/schemas/(\w+)'", str(schemas[one]))
    return found


def _schema_name(request_body: Any) -> str:
    if request_body is None:
        return ""
    (content,) = request_body["content"].values()
    return str(content["schema"].get("$ref", "")).rpartition("/")[2]


def _type_of(schema: dict[str, Any]) -> str:
    """The type of a field in words, with its range."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kinds_of(schema))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    for of, part in (("list", "items"), ("object", "additionalProperties")):
        if isinstance(schema.get(part), dict):
            kinds = _kinds_of(schema[part])
            inner = " or ".join(kinds)
            return f"{of} of ({inner})" if len(kinds) > 1 else f"{of} of {inner}"
    if kind == "array":
        return "list"
    return kind + _range_of(schema)


def _kinds_of(schema: dict[str, Any]) -> list[str]:
    """The alternatives of a schema in words."""
    kinds: list[str] = []
    for one in schema.get("anyOf", [schema]):
        kinds += _kinds_of(one) if "anyOf" in one else [_type_of(one)]
    return list(dict.fromkeys(kinds))


def _range_of(schema: dict[str, Any]) -> str:
    """The range of a number in words; "" if it has none."""
    numbers = {
        key: f"{int(value):,}" if value == int(value) else f"{value:g}"
        for key, value in schema.items()
        if type(value) in (int, float)
    }
    high = numbers.get("maximum")
    if "exclusiveMinimum" in numbers:
        return f", above {numbers['exclusiveMinimum']}, at most {high}"
    low = numbers.get("minimum")
    if low is None or schema.get("type") not in ("integer", "number"):
        return ""
    return f", {low} to {high}" if high is not None else f", at least {low}"


def page_of_python() -> Iterator[str]:
    """The names of `weft`, with their signatures and docstrings."""
    yield from ["# Python", "", NOTE, ""]
    yield "`from weft import LLM, SamplingParams`: the same scheduler, runner and tokenizer as the server's, without a server."
    for name in weft.__all__:
        thing = getattr(weft, name)
        if not inspect.isclass(thing):
            continue
        yield from ["", f"## {name}", ""]
        yield from _signature(name, thing)
        yield from _docstring(thing)
        for member_name, member in vars(thing).items():
            if not member_name.startswith("_") and (
                inspect.isfunction(member) or isinstance(member, property | classmethod)
            ):
                function = member.fget if isinstance(member, property) else member
                function = function.__func__ if isinstance(function, classmethod) else function
                if not inspect.getdoc(function):
                    continue
                yield from ["", f"### {name}.{member_name}", ""]
                if not isinstance(member, property):
                    yield from _signature(f"{name}.{member_name}", function)
                yield from _docstring(function)


def _signature(name: str, thing: Any) -> list[str]:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return []
    fields = _fields(thing) if inspect.isclass(thing) else []
    if fields:
        return ["```python", f"class {name}:", *fields, "```", ""]
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    result = signature.return_annotation
    arrow = "" if result is inspect.Signature.empty or inspect.isclass(thing) else f" -> {result!s}"
    if not parameters:
        return ["```python", f"{name}(){arrow}", "```", ""]
    lines = []
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and "    *," not in lines:
            lines.append("    *,")
        lines.append(f"    {_parameter(one)},")
    return ["```python", f"{name}(", *lines, f"){arrow}", "```", ""]


def _parameter(one: inspect.Parameter) -> str:
    name = str(one.replace(annotation=one.empty, default=one.empty))
    default = "" if one.default is one.empty else f" = {one.default!r}".replace("'", '"')
    return f"{name}: {one.annotation}{default}"


def _fields(thing: type) -> list[str]:
    """The fields of a class of data as its source declares them, with their comments."""
    source = textwrap.dedent(inspect.getsource(thing)).splitlines()
    (tree,) = ast.parse("\n".join(source)).body
    assert isinstance(tree, ast.ClassDef)
    lines: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.AnnAssign):
            first = node.lineno - 1
            while source[first - 1].strip().startswith("#"):
                first -= 1
            if lines and not source[first - 1].strip():
                lines.append("")
            lines += source[first : node.end_lineno]
    return lines


def _docstring(thing: Any) -> list[str]:
    text = inspect.getdoc(thing) or ""
    lines: list[str] = []
    in_code = False
    for line in text.splitlines():
        is_code = line.startswith("    ") or (in_code and not line)
        if is_code and not in_code:
            lines.append("```python")
        elif in_code and not is_code:
            lines[-1:] = ["```", ""] if not lines[-1] else [lines[-1], "```"]
        in_code = is_code
        lines.append(line.removeprefix("    ") if is_code else line)
    if in_code:
        lines.append("```")
    return lines


WRITERS: dict[str, Callable[[], Iterator[str]]] = {
    "command-line.md": page_of_command_line,
    "http.md": page_of_http,
    "python.md": page_of_python,
    "errors.md": lambda: errors.page(ROOT / "weft"),
}


if __name__ == "__main__":
    sys.exit(write_or_check("references.py", PAGES, WRITERS))
