"""The state of an engine as bytes: the first record of a journal that begins while there is work.

The state is a graph of plain Python objects and numpy arrays. `take` walks the graph from the
engine and writes every object once; `restore` builds the same graph again, in an engine that has
just been made. Fields are not listed one by one, so a new field of the scheduler needs no line
here. This is not pickle: only objects of the packages in `PACKAGES` are made, and no function that
the data names is called.

    {"classes": [[name, [attribute, ...]], ...],
     "things": [[kind, content], ...],
     "engine": number of a thing}

A value is an atom of msgpack, or [an `Is`, ...] for anything else. An object with an identity
(list, dict, array, instance) is a *thing*, and a value refers to it by its number: so shared
objects are shared again after a restore.

Objects that are not state (clock, device, grammar library and so on) are *outside*. The caller of
`take` names such an object by plain values, and the caller of `restore` provides a substitute.
"""

from __future__ import annotations

import importlib
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from enum import Enum, IntEnum
from types import MethodType
from typing import Any, TypeAlias

import msgspec
import numpy as np

from weft.json_types import JsonObject

Name: TypeAlias = list[Any]  # the name of an object outside: atoms
NameOf: TypeAlias = Callable[[Any], Name | None]
Find: TypeAlias = Callable[[Name], Any]

PACKAGES = (
    "weft.engine.",
    "weft.scheduler.",
    "weft.memory.",
    "weft.messages.",
    "weft.plan.",
    "weft.grammar.protocol",
    "weft.config.media",
    "weft.config.sight",
)
COMPRESSION = 1  # level of zlib: a large state consists mainly of zeros
SHORT_BYTES = 32  # longest bytes that are written inline
ATOMS = (type(None), bool, int, float, str)

INSTANCE = 100  # INSTANCE + i: a thing that is an object of class i

_MISSING = object()


class Is(IntEnum):
    """The type of a value that is not an atom."""

    REF = 0  # number of a thing
    OUTSIDE = 1  # number of the thing
    ENUM = 2  # its name
    TUPLE = 3  # values
    NAMED = 4  # class, values
    METHOD = 5  # owner, name
    SCALAR = 6  # dtype, bytes
    UNSET = 7  # a slot without a value


class Kind(IntEnum):
    """The type of a thing that is not an instance of one of our classes."""

    LIST = 0
    DICT = 1
    SET = 2
    DEQUE = 3
    ORDERED = 4
    BYTES = 5
    ARRAY = 6
    OBJECTS = 7  # an array of objects
    MESSAGE = 8
    COUNTER = 9


class SnapshotError(Exception):
    """A state that cannot be written, or cannot be restored here. The message gives the reason."""


def take(engine: object, name_of: NameOf) -> bytes:
    """The state of `engine`. `name_of` names an object that is outside, and returns None for
    others.

    Raises SnapshotError.
    """
    return zlib.compress(_Taker(name_of).all_of(engine), COMPRESSION)


def restore(engine: object, state: bytes, find: Find) -> None:
    """Give the saved state to `engine`, which has just been built. `find` returns the substitute of
    an object outside, by its name.

    Raises SnapshotError; then the engine cannot be used.
    """
    try:
        tree = msgspec.msgpack.decode(zlib.decompress(state))
        _Restorer(tree, find).into(engine)
    except (
        zlib.error,
        msgspec.DecodeError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
    ) as exc:
        raise SnapshotError(f"{type(exc).__name__}: {exc}") from exc


class _Taker:
    def __init__(self, name_of: NameOf) -> None:
        self._name_of = name_of
        self._classes: dict[tuple[type, tuple[str, ...]], int] = {}
        self._numbers: dict[int, int] = {}  # number of each thing, by id()
        self._found: list[Any] = []  # the things; references to them keep their ids unique
        self._slots: dict[type, tuple[str, ...]] = {}

    def all_of(self, engine: object) -> bytes:
        root = self._number(engine)
        written: list[list[Any]] = []
        # Writing one thing finds others. Without recursion, a long list of nodes needs no deep
        # stack.
        while len(written) < len(self._found):
            thing = self._found[len(written)]
            written.append(self._thing(thing))
        classes = [[_class_name(kind), names] for kind, names in self._classes]
        tree = {"classes": classes, "things": written, "engine": root}
        return msgspec.msgpack.encode(tree)

    def _number(self, thing: Any) -> int:
        number = self._numbers.get(id(thing))
        if number is None:
            number = len(self._found)
            self._numbers[id(thing)] = number
            self._found.append(thing)
        return number

    def _value(self, value: Any) -> Any:
        kind = type(value)
        is_short = kind is bytes and len(value) <= SHORT_BYTES
        if kind in ATOMS or is_short:
            return value
        name = self._name_of(value)
        if name is not None:
            return [Is.OUTSIDE, name]
        if isinstance(value, Enum):
            return [Is.ENUM, _class_name(kind), value.name]
        if kind is tuple:
            return [Is.TUPLE, self._values(value)]
        if isinstance(value, tuple):
            return [Is.NAMED, _class_name(kind), self._values(value)]
        if kind is MethodType:
            return [Is.METHOD, self._value(value.__self__), value.__name__]
        if isinstance(value, np.generic):
            return [Is.SCALAR, value.dtype.str, value.tobytes()]
        return [Is.REF, self._number(value)]

    def _values(self, values: Iterable[Any]) -> list[Any]:
        return [self._value(one) for one in values]

    def _thing(self, thing: Any) -> list[Any]:
        kind = type(thing)
        if kind is list:
            return [Kind.LIST, self._values(thing)]
        if kind is dict:
            return [Kind.DICT, self._pairs(thing)]
        if kind is OrderedDict:
            return [Kind.ORDERED, self._pairs(thing)]
        if kind is Counter:
            return [Kind.COUNTER, self._pairs(thing)]
        if kind is set or kind is frozenset:
            return [Kind.SET, self._values(thing)]
        if kind is deque:
            return [Kind.DEQUE, [thing.maxlen, self._values(thing)]]
        if kind is bytes:
            return [Kind.BYTES, thing]
        if kind is np.ndarray:
            return self._array(thing)
        if isinstance(thing, msgspec.Struct):
            message = msgspec.msgpack.encode(thing)
            return [Kind.MESSAGE, [_class_name(kind), message]]
        return self._instance(thing)

    def _pairs(self, pairs: dict[Any, Any]) -> list[list[Any]]:
        return [self._values(pairs.keys()), self._values(pairs.values())]

    def _array(self, array: Any) -> list[Any]:
        if array.dtype == object:
            values = self._values(array.ravel().tolist())
            return [Kind.OBJECTS, [array.shape, values]]
        kept = array
        # A table of rows that are mainly short: the columns after the last used one are zeros.
        if array.ndim == 2:
            used = np.flatnonzero(array.any(axis=0))
            num_used = 0
            if len(used):
                num_used = int(used[-1]) + 1
            kept = array[:, :num_used]
        data = np.ascontiguousarray(kept).tobytes()
        return [Kind.ARRAY, [array.dtype.str, array.shape, kept.shape, data]]

    def _instance(self, thing: Any) -> list[Any]:
        kind = type(thing)
        slots = self._slots.get(kind)
        if slots is None:
            slots = _slots_of(kind)
            self._slots[kind] = slots
        # Instances of one class may have different attributes: each set of names counts as a class.
        names = (*slots, *getattr(thing, "__dict__", ()))
        number = self._classes.get((kind, names))
        if number is None:
            if not _class_name(kind).startswith(PACKAGES):
                raise SnapshotError(f"an object of {_class_name(kind)} is part of the state")
            number = len(self._classes)
            self._classes[kind, names] = number
        written = []
        for name in names:
            value = getattr(thing, name, _MISSING)
            if value is _MISSING:
                written.append([Is.UNSET])
            else:
                written.append(self._value(value))
        return [INSTANCE + number, written]


class _Restorer:
    """Makes all things empty first, then fills objects and lists, and then fills dicts and sets,
    because the hash of a key may depend on the key's content."""

    def __init__(self, tree: JsonObject, find: Find) -> None:
        self._find = find
        self._kinds: dict[str, type] = {}
        self._classes = [(self._kind(name), names) for name, names in tree["classes"]]
        self._written: list[list[Any]] = tree["things"]
        self._root: int = tree["engine"]
        self._things: list[Any] = []

    def into(self, engine: object) -> None:
        for number, (kind, content) in enumerate(self._written):
            if number == self._root:
                self._things.append(engine)
            else:
                self._things.append(self._empty(kind, content))
        pairs = list(zip(self._things, self._written, strict=True))
        for thing, (kind, content) in pairs:
            self._fill(thing, kind, content)
        for thing, (kind, content) in pairs:
            self._hash(thing, kind, content)

    def _empty(self, kind: int, content: Any) -> Any:
        if kind >= INSTANCE:
            return object.__new__(self._classes[kind - INSTANCE][0])
        match kind:
            case Kind.LIST:
                return []
            case Kind.DICT:
                return {}
            case Kind.SET:
                return set()
            case Kind.DEQUE:
                return deque(maxlen=content[0])
            case Kind.ORDERED:
                return OrderedDict()
            case Kind.COUNTER:
                return Counter()
            case Kind.BYTES:
                return content
            case Kind.ARRAY:
                return self._array(*content)
            case Kind.OBJECTS:
                return np.empty(content[0], dtype=object)
            case Kind.MESSAGE:
                return msgspec.msgpack.decode(content[1], type=self._kind(content[0]))
        raise ValueError(f"there is no kind {kind}")

    @staticmethod
    def _array(dtype: str, shape: list[int], kept: list[int], data: bytes) -> Any:
        values = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(kept)
        if kept == shape:
            return values.copy()
        array = np.zeros(shape, dtype=values.dtype)
        array[:, : kept[1]] = values
        return array

    def _fill(self, thing: Any, kind: int, content: Any) -> None:
        if kind >= INSTANCE:
            _, names = self._classes[kind - INSTANCE]
            for name, value in zip(names, content, strict=True):
                if value != [Is.UNSET]:
                    # Also works for frozen dataclasses.
                    object.__setattr__(thing, name, self._value(value))
        elif kind == Kind.LIST:
            thing.extend(map(self._value, content))
        elif kind == Kind.DEQUE:
            thing.extend(map(self._value, content[1]))
        elif kind == Kind.OBJECTS:
            flat = thing.reshape(-1)
            for at, value in enumerate(content[1]):
                flat[at] = self._value(value)

    def _hash(self, thing: Any, kind: int, content: Any) -> None:
        if kind in (Kind.DICT, Kind.ORDERED, Kind.COUNTER):
            keys, values = content
            for key, value in zip(keys, values, strict=True):
                thing[self._value(key)] = self._value(value)
        elif kind == Kind.SET:
            thing.update(map(self._value, content))

    def _value(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        match value:
            case [Is.REF, int(number)]:
                return self._things[number]
            case [Is.OUTSIDE, name]:
                return self._find(name)
            case [Is.ENUM, str(kind), str(name)]:
                return self._kind(kind)[name]  # type: ignore[index]  # an Enum
            case [Is.TUPLE, list(values)]:
                return tuple(map(self._value, values))
            case [Is.NAMED, str(kind), list(values)]:
                return self._kind(kind)(*map(self._value, values))
            case [Is.METHOD, owner, str(name)]:
                method = getattr(self._value(owner), name)
                if isinstance(method, MethodType):
                    return method
            case [Is.SCALAR, str(dtype), bytes(data)]:
                return np.frombuffer(data, dtype=np.dtype(dtype))[0]
        raise ValueError(f"{value!r:.80} is no value")

    def _kind(self, name: str) -> type:
        """The class that `_class_name` gave this name."""
        found = self._kinds.get(name)
        if found is None:
            if not name.startswith(PACKAGES):
                raise ValueError(f"{name!r:.80} is no part of an engine's state")
            module, _, path = name.partition(":")
            thing: Any = importlib.import_module(module)
            for part in path.split("."):
                thing = getattr(thing, part)
            # A name that the module imported from elsewhere is refused, too.
            if not isinstance(thing, type) or _class_name(thing) != name:
                raise ValueError(f"{name!r:.80} is no class")
            found = thing
            self._kinds[name] = found
        return found


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _slots_of(kind: type) -> tuple[str, ...]:
    """The names of all slots of a class and of its bases."""
    found: list[str] = []
    for one in kind.__mro__:
        slots = one.__dict__.get("__slots__", ())
        # A class with one slot may give its name as a string.
        if isinstance(slots, str):
            slots = (slots,)
        found += slots
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))
