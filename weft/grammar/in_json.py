"""Grammars of a text, as grammars of the same text inside a JSON string.

A custom tool's text is an argument in JSON for most models, so its line feeds are written `\\n` and
its quotes `\\"`. Here each literal and each regular expression of a Lark grammar is changed to
match what it matched, in that form; the rules stay.

A regular expression becomes a rule of short terminals. As one terminal it would swallow the
backslash of a line feed that belongs to the next one, since the library reads terminals as far as
they go, and never back:

    line: "+" /.*/ LF        ▸  line: "+" (/[^"\\]+/ | /\\["\\bfrt]/)* lf
    %import common.LF           lf: "\\n"

Each character has one form, the shortest, and classes have no control characters beside those with
a letter (`\\b`, `\\f`, `\\n`, `\\r`, `\\t`). So a text that matches here, read as JSON, matches the
client's grammar. This module knows neither tokens nor the library that enforces the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise

from weft.grammar.ecma import Class, Piece, pieces
from weft.grammar.protocol import InvalidGrammar

# Characters with an escape of one letter, and these letters.
_LETTERS = dict(zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True))
_BACKSLASH = r"\x{5c}"
_PLAIN = r'[^"\\\x{0}-\x{1f}]'

# Lark's common terminals that match such characters; the library has the others by itself.
_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<import>%import[ \t]+common[ \t]*\.[ \t]*(?P<name>\w+)(?:[ \t]*->[ \t]*(?P<as>\w+))?)
    |(?P<imports>%import[ \t]+common[ \t]*\((?P<names>[^)]*)\))
    |(?P<ignore>%ignore[ \t]+
        (?:(?P<skipped>\w+)|"(?P<white>[^"\\]+)"|/(?P<skips>(?:[^/\\\n]|\\.)+)/))
    |(?P<directive>%\w+)
    |(?P<range>"(?P<first>[^"\\])"[ \t]*\.\.[ \t]*"(?P<last>[^"\\])")
    |(?P<string>"(?P<text>(?:[^"\\\n]|\\.)*)"(?P<folds>i?))
    |(?P<regex>/(?P<pattern>(?:[^/\\\n]|\\.)+)/(?P<flags>[a-z]*))
    |(?P<special><[^>\n]*>)
    |(?P<attribute>\[(?:lazy|capture|suffix|stop|max_tokens|temperature)\b)
    |(?P<word>[A-Za-z_]\w*)
    |(?P<other>\s+|\w+|.)""",
    re.VERBOSE | re.DOTALL,
)


def lark_in_json(definition: str) -> str:
    """Raises InvalidGrammar for what has no such form."""
    tokens = _TOKEN.finditer(definition)
    return "".join(_WRITERS[str(token.lastgroup)](token) for token in tokens)


def regex_in_json(pattern: str, *, dot_takes_all: bool = False) -> str:
    """A pattern of ECMA-262 as the body of a Lark rule."""
    found = pieces(pattern, dot_takes_all=dot_takes_all)
    if found[:1] == ["^"]:
        del found[0]
    if found[-1:] == ["$"]:
        del found[-1]
    written: list[str] = []
    run: list[int] = []  # characters that become one literal
    for piece, behind in pairwise([*found, ""]):
        is_repeated = isinstance(behind, str) and behind.startswith(("*", "+", "?", "{"))
        if isinstance(piece, int) and not is_repeated:
            run.append(piece)
            continue
        if run:
            written.append(_literal(run))
            run = []
        written.append(_rule_of(piece, is_endless=behind in ("*", "+")))
    if run:
        written.append(_literal(run))
    return f"({' '.join(written)})" if written else '""'


def _rule_of(piece: Piece, *, is_endless: bool) -> str:
    if isinstance(piece, int):
        return _literal([piece])
    if isinstance(piece, Class):
        return _class(piece, is_endless=is_endless)
    if piece in ("^", "$"):
        raise InvalidGrammar(f"{piece} inside a pattern is not supported in a call's JSON")
    return piece


def _literal(codes: list[int]) -> str:
    """Characters as a literal of their form in JSON."""
    return json.dumps(_form("".join(map(chr, codes))), ensure_ascii=False)


def _form(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _class(found: Class, *, is_endless: bool) -> str:
    """A class as its characters without an escape, or the escapes of the others in it."""
    plain = f"/[{found.text}&&{_PLAIN}]{'+' if is_endless else ''}/"
    letters = _letters(found)
    return f"({plain} | /{_BACKSLASH}[{letters}]/)" if letters else plain


def _letters(found: Class) -> str:
    """The letters of a class's characters that have an escape."""
    return "".join(_code(ord(letter)) for one, letter in _LETTERS.items() if found.has(ord(one)))


def _code(code: int) -> str:
    return f"\\x{{{code:x}}}"


# ---- tokens of Lark


def _import(token: re.Match[str]) -> str:
    return _imported(token["name"], token["as"] or token["name"], token[0])


def _imports(token: re.Match[str]) -> str:
    names = [name.strip() for name in token["names"].split(",")]
    return "\n".join(_imported(name, name, f"%import common.{name}") for name in names if name)


def _imported(name: str, own: str, line: str) -> str:
    if name not in _COMMON:
        return f"{line}\n{_rule_name(own)}: {own}"
    return f"{_rule_name(own)}: {regex_in_json(_COMMON[name])}"


def _ignore(token: re.Match[str]) -> str:
    """What is ignored is one terminal, so it stays one."""
    pattern = token["skips"] or _COMMON.get(token["skipped"] or "")
    if token["white"]:
        pattern = re.escape(token["white"])
    if pattern is None:
        raise InvalidGrammar(f"{token[0]} is not supported in a call's JSON; ignore a pattern")
    return f"%ignore /{''.join(map(_in_terminal, pieces(pattern)))}/"


def _in_terminal(piece: Piece) -> str:
    if isinstance(piece, str):
        return piece
    if isinstance(piece, int):
        return "".join(map(_code, map(ord, _form(chr(piece)))))
    letters = _letters(piece)
    plain = f"[{piece.text}&&{_PLAIN}]"
    return f"(?:{plain}|{_BACKSLASH}[{letters}])" if letters else plain


def _string(token: re.Match[str]) -> str:
    text = _unescaped(token["text"])
    if not token["folds"]:
        return _literal(list(map(ord, text)))
    # Only letters have two cases, and an escape's letter has one.
    either = [f'"{one}"i' if one.isalpha() else _literal([ord(one)]) for one in text]
    return f"({' '.join(either)})"


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        raise InvalidGrammar(f"an escape in the literal {text[:64]!r} is not known") from None


def _range(token: re.Match[str]) -> str:
    return regex_in_json(f"[{re.escape(token['first'])}-{re.escape(token['last'])}]")


def _regex(token: re.Match[str]) -> str:
    flags = token["flags"]
    if set(flags) - set("su"):
        raise InvalidGrammar(f"the flags {flags!r} of a pattern are not supported in a call's JSON")
    pattern = token["pattern"].replace("\\/", "/")
    return regex_in_json(pattern, dot_takes_all="s" in flags)


def _name(token: re.Match[str]) -> str:
    return _rule_name(token[0])


def _rule_name(name: str) -> str:
    """The name of a rule: terminals have become rules, and names of rules have small letters."""
    return f"t_{name.lower()}" if name.isupper() else name


def _refused(token: re.Match[str]) -> str:
    raise InvalidGrammar(f"{token[0][:64]!r} is not supported in the grammar of a custom tool")


def _same(token: re.Match[str]) -> str:
    return token[0]


_WRITERS: dict[str, Callable[[re.Match[str]], str]] = {
    "comment": lambda token: "",
    "import": _import,
    "imports": _imports,
    "ignore": _ignore,
    "directive": _refused,
    "range": _range,
    "string": _string,
    "regex": _regex,
    "special": _refused,
    "attribute": _refused,
    "word": _name,
    "other": _same,
}
