"""Why a server has refused a request, as it says in the body of its answer."""

from __future__ import annotations

import json


def error_text(body: bytes, other: str) -> str:
    """The message of an error in the form of OpenAI; `other` if the body has another form."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return other
