"""The form of message content that a chat template expects, detected in its syntax tree.

In the OpenAI API, content is a text, a list of parts, or null beside tool calls. Templates differ:
some loop over the parts, most take content as a text; some recognise a tool call by content that is
none, others print any content. Knows no messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jinja2 import nodes

# Most assignments from variable to variable through which content is traced, in any order.
MAX_HANDED_ON = 8
_LIST_FILTERS = frozenset(["map", "select", "selectattr", "reject", "rejectattr"])


class ContentFormat(NamedTuple):
    reads_lists: bool  # the template loops over content
    reads_texts: bool  # the template tests whether content is a text, or prints it unchanged
    reads_null: bool  # the template tests whether content is none


def content_format(template: nodes.Template) -> ContentFormat:
    """The format that a parsed template expects. Raises RecursionError."""
    names = _names_of_content(template)
    return ContentFormat(
        reads_lists=_has_content(_walked_through(template), names),
        reads_texts=_has_content(_taken_for_texts(template), names),
        reads_null=_has_content(_compared_with_none(template), names),
    )


def _has_content(expressions: Iterable[nodes.Node], names: set[str]) -> bool:
    return any(_is_content(expression, names) for expression in expressions)


def _walked_through(template: nodes.Template) -> list[nodes.Node]:
    """The expressions that loops and filters use as lists."""
    found: list[nodes.Node] = [loop.iter for loop in template.find_all(nodes.For)]
    filters = template.find_all(nodes.Filter)
    found += [one.node for one in filters if one.name in _LIST_FILTERS and one.node]
    return found


def _taken_for_texts(template: nodes.Template) -> list[nodes.Node]:
    """The expressions that are tested for texts, printed, or concatenated."""
    tests = template.find_all(nodes.Test)
    found: list[nodes.Node] = [test.node for test in tests if test.name == "string"]
    for output in template.find_all(nodes.Output):
        found += output.nodes
    for concat in template.find_all(nodes.Concat):
        found += concat.nodes
    for sum in template.find_all(nodes.Add):
        found += (sum.left, sum.right)
    for one in template.find_all(nodes.Filter):
        if one.name not in _LIST_FILTERS and one.node:
            found.append(one.node)
    return found


def _compared_with_none(template: nodes.Template) -> list[nodes.Node]:
    tests = template.find_all(nodes.Test)
    found: list[nodes.Node] = [test.node for test in tests if test.name == "none"]
    compares = template.find_all(nodes.Compare)
    found += [compare.expr for compare in compares if any(map(_is_none, compare.ops))]
    return found


def _is_none(operand: nodes.Operand) -> bool:
    return isinstance(operand.expr, nodes.Const) and operand.expr.value is None


def _names_of_content(template: nodes.Template) -> set[str]:
    """Variables and parameters of macros to which content is assigned."""
    # A value is content if it is `message.content`, or a name to which content was assigned.
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    assignments = template.find_all(nodes.Assign)
    assigned: list[tuple[nodes.Node, nodes.Node]]
    assigned = [(one.target, one.node) for one in assignments]
    for call in template.find_all(nodes.Call):
        assigned += _arguments(call, macros)
    names: set[str] = set()
    for _ in range(MAX_HANDED_ON):
        added: set[str] = set()
        for target, value in assigned:
            if isinstance(target, nodes.Name) and _is_content(value, names):
                added.add(target.name)
        names |= added
    return names


def _arguments(
    call: nodes.Call,
    macros: dict[str, nodes.Macro],
) -> list[tuple[nodes.Expr, nodes.Expr]]:
    """Pairs of parameter and argument of a call of a macro; none for other calls."""
    if not isinstance(call.node, nodes.Name) or call.node.name not in macros:
        return []
    parameters = macros[call.node.name].args
    by_name = {parameter.name: parameter for parameter in parameters}
    pairs: list[tuple[nodes.Expr, nodes.Expr]] = list(zip(parameters, call.args, strict=False))
    known = [keyword for keyword in call.kwargs if keyword.key in by_name]
    return pairs + [(by_name[keyword.key], keyword.value) for keyword in known]


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Whether the value is, or may be, the content of a message."""
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
