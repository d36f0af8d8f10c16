"""Values of an adapter's modules by patterns of their names, as in peft: the first key that matches
the end of a name decides, `re.match(rf"(.*\\.)?({key})$", name)`.

The publisher of the adapter wrote the patterns, so Python's `re` must not run them: its time may be
exponential. Most keys are names, and are looked up. The others become one automaton, whose steps
are counted; an adapter that needs more than `MAX_STEPS` is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from weft.config.automaton import Automaton, BadPattern, PatternNode

MAX_KEY_LEN = 300
MAX_EDGES = 20_000  # transitions of all patterns of a setting
MAX_STEPS = 5_000_000  # visits of nodes, for all modules of an adapter; about a second
_NAME = re.compile(r"\^?[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_ANY_SIGN = str.maketrans("._-", "...")


class _Name(NamedTuple):
    """A key without an operator besides dots."""

    position: int  # among the keys of the setting
    text: str
    is_anchored: bool  # it began with ^

    def matches(self, module: str) -> bool:
        """Whether it is the end of the name; a dot stands for any sign."""
        if len(module) > len(self.text) and (
            self.is_anchored or module[-len(self.text) - 1] != "."
        ):
            return False
        pairs = zip(self.text, module[-len(self.text) :], strict=True)
        return all(key in (".", char) for key, char in pairs)


class ModulePatterns:
    """The values of a setting, by patterns of names."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises BadPattern."""
        self._values = list(values.values())
        self._names: dict[str, list[_Name]] = {}
        self._positions: dict[str, int] = {}  # of keys that are no names, by their expression
        self._steps = 0
        for position, key in enumerate(values):
            if len(key) > MAX_KEY_LEN:
                raise BadPattern(f"{key[:64]!r}: patterns have at most {MAX_KEY_LEN} characters")
            if _NAME.fullmatch(key):
                name = _Name(position, key.removeprefix("^"), key.startswith("^"))
                self._names.setdefault(name.text.translate(_ANY_SIGN), []).append(name)
            else:
                self._positions.setdefault(rf"(?:.*\.)?(?:{key})", position)
        self._automaton = Automaton(self._positions, max_edges=MAX_EDGES)

    def value(self, module: str, otherwise: Any) -> Any:
        """The value of the first key that matches. Raises BadPattern if that takes too long."""
        positions = [name.position for name in self._named(module) if name.matches(module)]
        if self._positions:
            positions += self._matched(module)
        if not positions:
            return otherwise
        return self._values[min(positions)]

    def _named(self, module: str) -> Iterator[_Name]:
        """Names that the module may end in."""
        end = module.translate(_ANY_SIGN)
        while end:
            yield from self._names.get(end, ())
            end = end.partition(".")[2]

    def _matched(self, module: str) -> list[int]:
        """Run the automaton over the name. Returns the positions of the patterns that match."""
        live = dict.fromkeys(self._automaton.first)
        for before, char in zip(("", *module), (*module, ""), strict=False):
            self._pass_conditions(live, before, char)
            self._count(len(live))
            if char == "":
                break
            live = dict.fromkeys(
                following for node in live if node.accepts(char) for following in node.follow
            )
        return [self._positions[node.pattern] for node in live if node.pattern]

    def _pass_conditions(self, live: dict[PatternNode, None], before: str, after: str) -> None:
        """Add the nodes after conditions that hold between two characters."""
        left = [node for node in live if node.holds is not None]
        while left:
            node = left.pop()
            assert node.holds is not None
            if not node.holds(before, after):
                continue
            self._count(len(node.follow))
            for following in node.follow:
                if following not in live:
                    live[following] = None
                    if following.holds is not None:
                        left.append(following)

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise BadPattern(
                f"its patterns take more than {MAX_STEPS:,} steps for the names of the modules"
            )
