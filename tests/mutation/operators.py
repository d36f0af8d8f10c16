"""Small wrong changes of a module's source, one at a time.

A mutant is a piece of the source and what stands there instead, so that it can be shown as a
difference and keeps the lines of all functions before it. Left alone is what no test could or
should tell apart: assertions, type annotations, texts, and the checks of `zip(strict=True)`.
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "|"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SYMMETRIC = {"min", "max", "replace", "make_policy"}  # or with arguments that are no places
UNTOLD_KEYWORDS = {"strict", "slots", "frozen", "kw_only", "dtype", "copy", "kind"}


@dataclass(frozen=True)
class Mutant:
    """`replacement` stands at bytes `start` to `end` of the source of `path`."""

    path: str
    function: str  # qualified name of the outermost function around it; empty at the level of module or class
    first_line: int  # of that function, with its decorators
    line: int
    start: int
    end: int
    replacement: str
    kind: str

    def apply(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.start] + self.replacement.encode() + raw[self.end :]).decode()

    def changed(self, source: str) -> tuple[str, str]:
        """The lines that differ, before and after, without indentation; the name of a mutant that
        outlives edits elsewhere in its file."""
        before = source.splitlines()
        after = self.apply(source).splitlines()
        matcher = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
        spans = [one for one in matcher.get_opcodes() if one[0] != "equal"]
        gone = before[spans[0][1] : spans[-1][2]]
        come = after[spans[0][3] : spans[-1][4]]
        return _joined(gone), _joined(come)


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda one: (one.start, one.end, one.replacement))


def functions_of(source: str) -> dict[str, tuple[int, int, int]]:
    """By qualified name of each outermost function: its first line, counted from 1, and its lines
    as a slice."""
    found: dict[str, tuple[int, int, int]] = {}

    def look(body: list[ast.stmt], scope: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{scope}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                found[scope + node.name] = first, first - 1, node.end_lineno or first

    look(ast.parse(source).body, "")
    return found


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._raw = source.encode()
        starts = [0]
        for line in self._raw.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._line_starts = starts
        self._scopes: list[str] = []
        self._function = ""
        self._first_line = 0

    # Where we are

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scopes.append(node.name)
        self._visit_all(node.body)
        self._scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = node.args
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self.visit(default)
        is_outermost = not self._function
        if is_outermost:
            self._function = ".".join([*self._scopes, node.name])
            self._first_line = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        self._visit_all(node.body)
        if is_outermost:
            self._function = ""
            self._first_line = 0

    def _visit_all(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    # What is left alone

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._removal(node, node.target)
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass", "statement removed")

    # What is changed

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call) and not self._is_super_init(node.value):
            self._replace(node, "pass", "statement removed")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._removal(node, *node.targets)
        if any(
            isinstance(target, ast.Name) and target.id == "__slots__" for target in node.targets
        ):
            return
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass", "statement removed")
        pair = ARITHMETIC.get(type(node.op))
        if pair is not None:
            self._operator(node.target, node.value, pair[0] + "=", pair[1] + "=", "arithmetic")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._replace(node, "pass", "statement removed")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "pass", "statement removed")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "pass", "statement removed")

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self._replace(node, self._text(node.operand, with_brackets=True), "negation")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            self._operator(left, right, *COMPARISONS[type(op)], "comparison")
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        names = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._operator(left, right, *names, "connective")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        pair = ARITHMETIC.get(type(node.op))
        if pair is not None:
            self._operator(node.left, node.right, *pair, "arithmetic")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace(node, str(not value), "constant")
        elif isinstance(value, int):
            self._replace(node, str(value + 1), "constant")
        elif isinstance(value, float):
            self._replace(node, repr(value * 2 if value else 1.0), "constant")

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in OTHER_NAMES:
            self._replace(node.func, OTHER_NAMES[name], "name")
        if name not in SYMMETRIC and not any(isinstance(one, ast.Starred) for one in node.args):
            for first, second in zip(node.args, node.args[1:], strict=False):
                between = self._raw[self._end(first) : self._start(second)].decode()
                swapped = self._text(second) + between + self._text(first)
                if self._text(first) != self._text(second):
                    self._put(
                        first, self._start(first), self._end(second), swapped, "arguments swapped"
                    )
        self.visit(node.func)
        for one in node.args:
            self.visit(one)
        for keyword in node.keywords:
            if keyword.arg not in UNTOLD_KEYWORDS:
                self.visit(keyword.value)

    # Writing them down

    def _removal(self, node: ast.stmt, *targets: ast.expr) -> None:
        """A name that is never set fails wherever it is read; what others see is worth a look."""
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
            self._replace(node, "pass", "statement removed")

    def _negate(self, test: ast.expr) -> None:
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self._replace(test, f"not ({self._text(test)})", "negation")

    def _operator(self, left: ast.AST, right: ast.AST, old: str, new: str, kind: str) -> None:
        start = self._end(left)
        end = self._start(right)
        between = self._raw[start:end].decode()
        pattern = old.replace(" ", r"\s+") if old[0].isalpha() else re.escape(old)
        place = re.search(rf"\b{pattern}\b" if old[0].isalpha() else pattern, between)
        if place is not None:
            self._put(left, start + place.start(), start + place.end(), new, kind)

    def _replace(self, node: ast.AST, text: str, kind: str) -> None:
        self._put(node, self._start(node), self._end(node), text, kind)

    def _put(self, node: ast.AST, start: int, end: int, text: str, kind: str) -> None:
        line: int = node.lineno  # type: ignore[attr-defined]
        self.found.append(
            Mutant(self._path, self._function, self._first_line, line, start, end, text, kind)
        )

    def _start(self, node: ast.AST) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _text(self, node: ast.AST, *, with_brackets: bool = False) -> str:
        text = self._raw[self._start(node) : self._end(node)].decode()
        return (
            f"({text})"
            if with_brackets and not isinstance(node, ast.Name | ast.Constant | ast.Call)
            else text
        )

    @staticmethod
    def _is_super_init(call: ast.Call) -> bool:
        return "super()" in ast.unparse(call)


def _joined(lines: list[str]) -> str:
    return " ".join(" ".join(line.split()) for line in lines)
