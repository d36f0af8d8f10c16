"""Structural tags as Lark, the language of llguidance: free text that contains structures.

    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}     the older form
    {"format": {"type": ..., ...}}                                      the newer: nested formats

Free text ends where the next format begins; so it may come last, or before a fixed text. Free text
with tags in it (`triggered_tags`) has fields of our own, for calls of tools:

    first              formats that may begin the text, beside a tag
    never_first        a pattern that the text does not begin with
    excluded_pattern   a pattern that no free text contains, as `excludes` are texts
    is_last            nothing follows a tag

This module knows nothing of schemas and tokens: functions translate both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

from weft.grammar.in_json import lark_in_json, regex_in_json
from weft.grammar.parts import before_error
from weft.grammar.protocol import InvalidGrammar
from weft.json_types import JsonObject

Format: TypeAlias = JsonObject
TEXT = r"/(.|\n)*/"
# Special tokens (ids) and the texts between them, in order.
Pieces: TypeAlias = list[str | int]
_REPEATS = {"optional": "?", "star": "*", "plus": "+"}


def as_format(tag: JsonObject) -> Format:
    """The format of a structural tag of either form. Raises InvalidGrammar."""
    try:
        if "format" in tag:
            return dict(tag["format"])
        tags: list[Format] = []
        for one in tag["structures"]:
            content = {"type": "json_schema", "json_schema": one["schema"]}
            tags.append(
                {"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]}
            )
        return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError, ValueError) as exc:
        raise InvalidGrammar(
            "structural_tag: a format, or structures (each with begin, schema and end) and "
            "triggers are needed"
        ) from exc


def with_schemas(format: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a format with `change` applied to all of its JSON schemas."""
    if isinstance(format, list):
        return [with_schemas(one, change) for one in format]
    if not isinstance(format, dict):
        return format
    changed: Format = {}
    for key, value in format.items():
        if key == "json_schema":
            changed[key] = change(value)
        else:
            changed[key] = with_schemas(value, change)
    return changed


class LarkWriter:
    """Writes a format as Lark rules."""

    def __init__(
        self,
        schema: Callable[[Any], str],
        regex: Callable[[str], str],
        split: Callable[[str], Pieces],
    ) -> None:
        """`schema` writes a JSON schema as the body of a rule, `regex` a pattern as what stands
        between slashes; `split` finds the special tokens in a text."""
        self._schema = schema
        self._regex = regex
        self._split = split
        self._names: dict[str, str] = {}  # of the rules, by attributes and body

    def grammar(self, format: Format) -> str:
        """The whole grammar. Raises InvalidGrammar."""
        try:
            start = self._write(format)
        except KeyError as exc:
            raise InvalidGrammar(f"structural_tag: a format has no {exc.args[0]!r}") from exc
        except (TypeError, AttributeError, RecursionError) as exc:
            raise InvalidGrammar(f"structural_tag: a format is not valid: {exc}") from exc
        rules = [f"{name}{rest}" for rest, name in self._names.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules])

    def _rule(self, body: str, attributes: str = "", prefix: str = "r") -> str:
        """Add a rule, unless it is there. Returns its name."""
        return self._names.setdefault(f"{attributes}: {body}", f"{prefix}{len(self._names)}")

    def _terminal(self, body: str) -> str:
        """Add a terminal, which is read as one. Returns its name."""
        return self._rule(body, prefix="T")

    def _write(self, format: Format) -> str:
        """A format as text for the body of a rule."""
        match format["type"]:
            case "const_string":
                return self._literal(format["value"])
            case "json_schema" if format.get("style", "json") == "json":
                return self._rule(self._schema(format["json_schema"]))
            case "regex":
                return self._rule(f"/{self._regex(format['pattern'])}/")
            case "grammar":
                return self._rule(self._grammar(format))
            case "any_text":
                return self._passing(format) + self._rule(self._text(format))
            case "sequence":
                return self._sequence(format["elements"])
            case "or":
                return f"({self._alternatives(format['elements'])})"
            case "optional" | "star" | "plus" as kind:
                return f"({self._write(format['content'])}){_REPEATS[kind]}"
            case "repeat":
                return self._repeat(format)
            case "tag":
                return self._sequence(_parts(format))
            case "triggered_tags":
                return self._triggered(format)
            case "tags_with_separator":
                return self._separated(format)
        raise InvalidGrammar(f"structural_tag: a format {_short(format)} is not supported")

    def _grammar(self, format: Format) -> str:
        """A grammar of its own inside this one, with `in_json` of a text in a JSON string."""
        try:
            return self._own_grammar(format)
        except InvalidGrammar as exc:
            raise InvalidGrammar(f"{before_error(format.get('path'))}{exc}") from exc

    def _own_grammar(self, format: Format) -> str:
        definition = format["definition"]
        in_json = bool(format.get("in_json"))
        match format["syntax"]:
            case "lark":
                own = lark_in_json(definition) if in_json else definition
                return f"%lark {{\n{own}\n}}"
            case "regex":
                return regex_in_json(definition) if in_json else f"/{self._regex(definition)}/"
        raise InvalidGrammar(f"structural_tag: a format {_short(format)} is not supported")

    def _alternatives(self, formats: list[Format]) -> str:
        return " | ".join(map(self._write, formats))

    def _repeat(self, format: Format) -> str:
        least = int(format["min"])
        most = ""
        if format["max"] != -1:
            most = str(int(format["max"]))
        return f"({self._write(format['content'])}){{{least},{most}}}"

    def _sequence(self, elements: list[Format]) -> str:
        """The formats one after the other. Free text ends at the fixed text after it."""
        parts: list[Format] = []
        for element in elements:
            if element["type"] == "tag":
                parts += _parts(element)
            else:
                parts.append(element)
        written: list[str] = []
        remaining = iter(parts)
        for part in remaining:
            # Free text and the fixed text after it are one rule, which ends with the fixed text.
            follower = next(remaining, None) if part["type"] == "any_text" else None
            if follower is None:
                written.append(self._write(part))
                continue
            if follower["type"] != "const_string" or not follower["value"]:
                raise InvalidGrammar(
                    "structural_tag: after any_text there must be a fixed text, or nothing"
                )
            until = self._up_to(follower["value"], self._text(part))
            written.append(self._passing(part) + until)
        return f"({' '.join(written)})"

    def _triggered(self, format: Format) -> str:
        """Free text in which every occurrence of a trigger must begin one of the tags.

        With `at_least_one` the text begins with a tag.
        """
        rests: dict[str, list[str]] = {}  # by trigger: the rest of each of its tags
        for tag in format["tags"]:
            begin = tag["begin"]
            trigger = _trigger_of(begin, format["triggers"])
            # The rule of the trigger ends with the trigger, so the rest of the tag comes after it.
            rest = self._sequence(_parts({**tag, "begin": begin[len(trigger) :]}))
            rests.setdefault(trigger, []).append(rest)
        text = self._text(format, spelled=tuple(rests))
        first_text = text
        if format.get("never_first"):
            first_text = self._terminal(f"{text} & ~/({format['never_first']})(.|\\n)*/")
        later_tag = self._tags_in(rests, text)
        first = [self._write(one) for one in format.get("first") or ()]
        is_last = bool(format.get("stop_after_first") or format.get("is_last"))
        if format.get("at_least_one"):
            for trigger, of_trigger in rests.items():
                first.append(f"{self._literal(trigger)} ({_either(of_trigger)})")
            if is_last:
                return f"({_either(first)})"
            return f"(({_either(first)}) ({later_tag})* {self._rule(text)})"
        if not first and first_text == text and not is_last:
            return f"(({later_tag})* {self._rule(text)})"
        first_tag = _either([*first, self._tags_in(rests, first_text)])
        if is_last:
            return f"({first_tag} | {self._rule(first_text)})"
        more = f"({first_tag}) ({later_tag})* {self._rule(text)}"
        return f"({more} | {self._rule(first_text)})"

    def _tags_in(self, rests: dict[str, list[str]], text: str) -> str:
        """Free text, and then a tag."""
        return _either(
            [
                f"{self._up_to(trigger, text)} ({_either(of_trigger)})"
                for trigger, of_trigger in rests.items()
            ]
        )

    def _separated(self, format: Format) -> str:
        one = self._alternatives(format["tags"])
        written = f"({one})"
        if not format.get("stop_after_first"):
            written += f" ({self._literal(format['separator'])} ({one}))*"
        if format.get("at_least_one"):
            return f"({written})"
        return f"({written})?"

    def _text(self, format: Format, spelled: tuple[str, ...] = ()) -> str:
        """The terminal of free text. It has no special tokens; of the texts `spelled`, those that
        contain one cannot be written with other tokens, either."""
        excluded = list(map(json.dumps, format.get("excludes") or ()))
        excluded += [json.dumps(one) for one in spelled if self._split(one) != [one]]
        if format.get("excluded_pattern"):
            excluded.append(f"/{format['excluded_pattern']}/")
        if not excluded:
            return TEXT
        return self._terminal(f"{TEXT} & ~({TEXT} ({_either(excluded)}) {TEXT})")

    def _passing(self, format: Format) -> str:
        """Free text up to special tokens that may stand in it."""
        ids: list[str] = []
        for mark in format.get("passing") or ():
            ids += [f"<[{one}]>" for one in self._split(mark) if isinstance(one, int)]
        return f"({self._rule(self._text(format))} ({_either(ids)}))* " if ids else ""

    def _up_to(self, text: str, free: str) -> str:
        """Free text up to and including the first `text`."""
        pieces = self._split(text)
        if pieces == [text]:
            return self._rule(f"{free} {json.dumps(text)}", "[lazy]")
        # A special token ends the free text by itself.
        before = ""
        if isinstance(pieces[0], str):
            before = json.dumps(pieces.pop(0))
        return f"{self._terminal(f'{free} {before}')} {_written(pieces)}"

    def _literal(self, text: str) -> str:
        return _written(self._split(text))


def _written(pieces: Pieces) -> str:
    return " ".join(
        f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces
    )


def _either(rules: list[str]) -> str:
    return " | ".join(rules)


def _trigger_of(begin: str, triggers: list[str]) -> str:
    for trigger in triggers:
        if trigger and begin.startswith(trigger):
            return trigger
    raise InvalidGrammar(f"structural_tag: {_short(begin)} begins with none of the triggers")


def _parts(tag: Format) -> list[Format]:
    """A tag as a sequence, without empty texts."""
    ends = tag["end"]
    if not isinstance(ends, list):
        ends = [ends]
    if not isinstance(tag["begin"], str) or not all(isinstance(end, str) for end in ends):
        raise InvalidGrammar("structural_tag: a tag must begin and end with text")
    end_formats = [_fixed(end) for end in ends]
    last: Format = {"type": "or", "elements": end_formats}
    if len(end_formats) == 1:
        last = end_formats[0]
    parts = [_fixed(tag["begin"]), tag["content"], last]
    return [part for part in parts if not _is_empty(part)]


def _fixed(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _is_empty(part: Format) -> bool:
    return part.get("value") == "" and bool(part["type"] == "const_string")


def _short(value: Any) -> str:
    return json.dumps(value)[:100]
