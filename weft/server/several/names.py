"""The names of a server's models, and the model that a request means by one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.client.adapters import DEFAULT_MODEL
from weft.config.options import did_you_mean
from weft.server.errors import ApiError

MOST_LISTED = 20  # names in an error


class NamesOfModels:
    """Names and aliases; every one of them belongs to one model."""

    def __init__(self) -> None:
        self._own: dict[str, str] = {}  # name or alias -> name
        self.default = ""

    def add(self, name: str, aliases: Sequence[str] = ()) -> None:
        """Raises ValueError if a name belongs to another model already."""
        for one in (name, *aliases):
            if self._own.get(one, name) != name:
                raise ValueError(f"{one!r} already names the model {self._own[one]!r}")
        for one in (name, *aliases):
            self._own[one] = name
        self.default = self.default or name

    def remove(self, name: str) -> None:
        self._own = {one: own for one, own in self._own.items() if own != name}
        if self.default == name:
            self.default = next(iter(self._own.values()), "")

    def own(self, asked: str) -> str | None:
        """The own name of the model with this name or alias; None: there is none."""
        return self._own.get(asked)

    def find(self, asked: str, adapters: Callable[[], Mapping[str, str]]) -> str | None:
        """The own name of the model that is meant; None if there is none. `adapters` lists the
        names of loaded adapters, and the model of each; it is called if no model has the name."""
        if asked in ("", DEFAULT_MODEL):
            return self.default or None
        found = self._own.get(asked) or adapters().get(asked)
        if found is not None:
            return found
        # "MODEL:ADAPTER"; names of models may have colons, too.
        for end in (at for at, letter in enumerate(asked) if letter == ":"):
            if asked[:end] in self._own:
                found = self._own[asked[:end]]
        return found

    def unknown(self, asked: str) -> ApiError:
        """The answer for a name that belongs to no model."""
        names = list(dict.fromkeys(self._own.values()))
        if not names:
            message = "this server has no models; weft pull gets one"
            return ApiError(404, message, param="model", code="model_not_found")
        listed = ", ".join(map(repr, names[:MOST_LISTED]))
        if len(names) > MOST_LISTED:
            listed += f" and {len(names) - MOST_LISTED} more (GET /v1/models)"
        message = f"the model {asked[:128]!r} does not exist; this server has {listed}"
        message += did_you_mean(asked, self._own)
        return ApiError(404, message, param="model", code="model_not_found")
