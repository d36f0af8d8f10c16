"""Names of models on the hub.

    org/name                    safetensors
    org/name:Q4_K_M             the GGUF file of this type
    org/name/folder/file.gguf   one GGUF file

Names come from users, and from requests: what could lead out of a folder, or control a terminal, is
refused by name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from weft.config.model import ModelNotFound
from weft.weights.gguf.files import ENDING

SITES = ("https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/")
MAX_NAME_LEN = 256
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


class BadName(ModelNotFound):
    """This cannot be the name of a model."""


class HubName(NamedTuple):
    repo: str  # org/name
    kind: str = ""  # type of a GGUF file: "Q4_K_M"
    file: str = ""  # path of a GGUF file in the repository

    def __str__(self) -> str:
        if self.kind:
            return f"{self.repo}:{self.kind}"
        return f"{self.repo}/{self.file}" if self.file else self.repo


def hub_name(text: str) -> HubName:
    """The name of a model on the hub. Raises BadName."""
    require_printable(text)
    name = text
    for site in SITES:
        name = name.removeprefix(site)
    repo, _, kind = name.partition(":")
    org, *rest = repo.strip("/").split("/")
    file = "/".join(rest[1:])
    parts = [org, *rest]
    is_wrong = len(parts) < 2 or not all(map(is_plain, parts))
    if is_wrong or (":" in name and not _TYPE.fullmatch(kind)) or (file and kind):
        raise BadName(
            f"{text!r} is no name of a model on the hub; ORG/NAME, ORG/NAME:Q4_K_M and "
            "ORG/NAME/FILE.gguf are"
        )
    if file and not file.endswith(ENDING):
        raise BadName(f"{text!r} names a file; only {ENDING} files are models of one file")
    return HubName(f"{org}/{rest[0]}", kind, file)


def is_plain(part: str) -> bool:
    """Whether a part of a path is a name, and leads nowhere else."""
    return _PART.fullmatch(part) is not None and ".." not in part


def require_printable(text: str) -> None:
    """Raise BadName for a name that is too long, or has characters that control terminals."""
    if not text or len(text) > MAX_NAME_LEN:
        raise BadName(f"a name of a model has 1 to {MAX_NAME_LEN} characters, not {len(text):,}")
    if not text.isprintable():
        raise BadName(f"{text!r} has characters that no name of a model has")
