"""What JSON becomes in Python, where no schema says more. It knows nothing of what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]  # one that is only read

# In a JSON schema: the path to it in the body of the client. Libraries ignore such keys.
PATH_KEY = "x-weft-path"
