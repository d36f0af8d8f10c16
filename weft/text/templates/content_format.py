"""What a chat template expects of the content of messages, read from its syntax tree.

The OpenAI API has content as a text, as a list of parts, or null beside tool calls. Templates differ: some walk through
the parts, most take content for a text; some tell a call by content that is none, others print whatever is there.
Knows nothing of messages.
"""

from __future__ import annotations

from typing import NamedTuple

from jinja2 import nodes

MAX_HANDED_ON = 8  # from variable to variable, against the order in which they stand
_LIST_FILTERS = frozenset(["map", "select", "selectattr", "reject", "rejectattr"])


class ContentFormat(NamedTuple):
    reads_lists: bool  # it walks through content
    reads_null: bool  # it asks whether content is none


def content_format(template: nodes.Template) -> ContentFormat:
    """Of a template as it was parsed. Raises RecursionError."""
    names = _names_of_content(template)
    looped = [loop.iter for loop in template.find_all(nodes.For)]
    filtered = [
        one.node
        for one in template.find_all(nodes.Filter)
        if one.name in _LIST_FILTERS and one.node
    ]
    asked = [test.node for test in template.find_all(nodes.Test) if test.name == "none"]
    asked += [compare.expr for compare in template.find_all(nodes.Compare) if _has_none(compare)]
    return ContentFormat(
        reads_lists=any(_is_content(node, names) for node in [*looped, *filtered]),
        reads_null=any(_is_content(node, names) for node in asked),
    )


def _has_none(compare: nodes.Compare) -> bool:
    return any(
        isinstance(operand.expr, nodes.Const) and operand.expr.value is None
        for operand in compare.ops
    )


def _names_of_content(template: nodes.Template) -> set[str]:
    """Variables and parameters of macros that content is put into."""
    names: set[str] = set()
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    assigned = [(one.target, one.node) for one in template.find_all(nodes.Assign)]
    assigned += [pair for call in template.find_all(nodes.Call) for pair in _given(call, macros)]
    for _ in range(MAX_HANDED_ON):
        names |= {
            target.name
            for target, value in assigned
            if isinstance(target, nodes.Name) and _is_content(value, names)
        }
    return names


def _given(call: nodes.Call, macros: dict[str, nodes.Macro]) -> list[tuple[nodes.Expr, nodes.Expr]]:
    """The parameters of the macro that is called, and what each is given."""
    macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
    if macro is None:
        return []
    by_name = {parameter.name: parameter for parameter in macro.args}
    pairs: list[tuple[nodes.Expr, nodes.Expr]] = list(zip(macro.args, call.args, strict=False))
    return pairs + [(by_name[one.key], one.value) for one in call.kwargs if one.key in by_name]


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Whether the value is the content of a message, or may be."""
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.Filter():
            return _is_content(node.node, names)
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or _is_content(node.expr2, names)
        case nodes.Or() | nodes.And():
            return _is_content(node.left, names) or _is_content(node.right, names)
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
            return True
    return False
