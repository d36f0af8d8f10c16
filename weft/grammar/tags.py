"""Structural tags as Lark, the language of llguidance: free text with structures in it, or structures put together.

    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}     the older form
    {"format": {"type": ..., ...}}                                      the newer one: formats within formats

Free text ends where what must follow it begins; so it may stand last, or before a fixed text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

from weft.grammar.protocol import InvalidGrammar

Format: TypeAlias = dict[str, Any]
TEXT = r"/(.|\n)*/"


def as_format(tag: dict[str, Any]) -> Format:
    """The format of a structural tag in either form."""
    if "format" in tag:
        return dict(tag["format"])
    tags = [
        {
            "type": "tag",
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": one["end"],
        }
        for one in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def with_schemas(format: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a format with all JSON schemas in it changed."""
    if isinstance(format, list):
        return [with_schemas(one, change) for one in format]
    if not isinstance(format, dict):
        return format
    return {
        key: change(value) if key == "json_schema" else with_schemas(value, change)
        for key, value in format.items()
    }


class LarkWriter:
    """Writes a format down as rules. `schema` gives the JSON schema to use for one, `regex` a pattern as it stands
    between slashes, `special` the id of a text that is one special token, or None."""

    def __init__(
        self,
        schema: Callable[[Any], Any],
        regex: Callable[[str], str],
        special: Callable[[str], int | None],
    ) -> None:
        self._schema = schema
        self._regex = regex
        self._special = special
        self._rules: list[str] = []

    def grammar(self, format: Format) -> str:
        """The whole grammar. Raises InvalidGrammar."""
        try:
            start = self._write(format)
        except (KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise InvalidGrammar(f"structural_tag: a format is not as it must be: {exc!r}") from exc
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _write(self, format: Format) -> str:
        """What a format is, in a rule's body."""
        write = self._write
        match format["type"]:
            case "const_string":
                return self._literal(format["value"])
            case "json_schema" if format.get("style", "json") == "json":
                return self._rule(f"%json {json.dumps(self._schema(format['json_schema']))}")
            case "regex":
                return self._rule(f"/{self._regex(format['pattern'])}/")
            case "any_text" if not format.get("excludes"):
                return self._rule(TEXT)
            case "sequence":
                return self._sequence(format["elements"])
            case "or":
                return f"({' | '.join(map(write, format['elements']))})"
            case "optional" | "star" | "plus" as kind:
                sign = {"optional": "?", "star": "*", "plus": "+"}[kind]
                return f"({write(format['content'])}){sign}"
            case "repeat":
                most = "" if format["max"] == -1 else int(format["max"])
                return f"({write(format['content'])}){{{int(format['min'])},{most}}}"
            case "tag":
                return self._sequence(_parts(format))
            case "triggered_tags" if not format.get("excludes"):
                return self._triggered(format)
            case "tags_with_separator":
                return self._separated(format)
        raise InvalidGrammar(f"structural_tag: a format {_short(format)} is not supported")

    def _sequence(self, elements: list[Format]) -> str:
        """One format behind the other. Free text goes up to the fixed text behind it, and no further."""
        parts = [
            part
            for element in elements
            for part in (_parts(element) if element["type"] == "tag" else [element])
        ]
        written, at = [], 0
        while at < len(parts):
            part, after = parts[at], parts[at + 1 : at + 2]
            is_free = part["type"] == "any_text" and not part.get("excludes")
            if is_free and after:
                if after[0]["type"] != "const_string" or not after[0]["value"]:
                    raise InvalidGrammar(
                        "structural_tag: behind any_text there must be a fixed text, or nothing"
                    )
                written.append(self._up_to(after[0]["value"]))
                at += 2
            else:
                written.append(self._write(part))
                at += 1
        return f"({' '.join(written)})"

    def _triggered(self, format: Format) -> str:
        """Free text in which whatever begins like a trigger must be one of the tags; with `at_least_one` it begins
        with one."""
        rests: dict[str, list[str]] = {}
        for tag in format["tags"]:
            begin = tag["begin"]
            trigger = next(
                (one for one in format["triggers"] if one and begin.startswith(one)), None
            )
            if trigger is None:
                raise InvalidGrammar(
                    f"structural_tag: {_short(begin)} begins with none of the triggers"
                )
            rest = self._sequence(_parts({**tag, "begin": begin[len(trigger) :]}))
            rests.setdefault(trigger, []).append(rest)
        first = " | ".join(
            f"{self._literal(trigger)} ({' | '.join(rest)})" for trigger, rest in rests.items()
        )
        later = " | ".join(
            f"{self._up_to(trigger)} ({' | '.join(rest)})" for trigger, rest in rests.items()
        )
        at_once = bool(format.get("at_least_one"))
        if format.get("stop_after_first"):
            return f"({first})" if at_once else f"({later} | {self._rule(TEXT)})"
        return f"({f'({first}) ' if at_once else ''}({later})* {self._rule(TEXT)})"

    def _separated(self, format: Format) -> str:
        one = " | ".join(map(self._write, format["tags"]))
        more = (
            ""
            if format.get("stop_after_first")
            else f" ({self._literal(format['separator'])} ({one}))*"
        )
        return f"(({one}){more})" if format.get("at_least_one") else f"(({one}){more})?"

    def _up_to(self, text: str) -> str:
        """Free text up to the first time that `text` stands there, and this."""
        special = self._special(text)
        if special is not None:
            return f"{self._rule(TEXT)} <[{special}]>"
        return self._rule(f"{TEXT} {json.dumps(text)}", "[lazy]")

    def _literal(self, text: str) -> str:
        special = self._special(text)
        return json.dumps(text) if special is None else f"<[{special}]>"


def _parts(tag: Format) -> list[Format]:
    """A tag as a sequence."""
    ends = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
    if not isinstance(tag["begin"], str) or not all(isinstance(end, str) for end in ends):
        raise InvalidGrammar("structural_tag: a tag must begin and end with text")
    begin, *end = [{"type": "const_string", "value": text} for text in (tag["begin"], *ends)]
    last = end[0] if len(end) == 1 else {"type": "or", "elements": end}
    return [
        part
        for part in (begin, tag["content"], last)
        if part.get("value") != "" or part["type"] != "const_string"
    ]


def _short(value: Any) -> str:
    return json.dumps(value)[:100]
