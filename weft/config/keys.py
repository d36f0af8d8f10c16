"""The API keys of a server, read once from options, files or the environment, and kept only as
SHA-256 digests.

A key has a name, which is not secret: tenants, sessions and stored responses are identified by it.
Two keys with the same name are one tenant, so a key can be replaced while the old one still works.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.config.engine import EngineConfig
from weft.config.options import SettingsError
from weft.config.server import ServerConfig

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
NAMED = re.compile(r"@(\S*)\s+(.*)")
COMMENT = re.compile(r"(?:^|\s)#.*")  # a # within a key begins none


@dataclass(frozen=True)
class KeyDigests:
    """The SHA-256 digests of all accepted keys. `names`: digest → name that the file gives the
    key."""

    user: tuple[bytes, ...] = ()
    admin: tuple[bytes, ...] = ()
    names: Mapping[bytes, str] = field(default_factory=dict)

    def name(self, key: bytes) -> str:
        """The name of a key; without a given name, the beginning of its digest."""
        return self.names.get(key) or f"key-{key.hex()[:8]}"

    @property
    def num_owners(self) -> int:
        """The number of different names of the users' keys."""
        return len({self.name(key) for key in self.user})


def read_keys(config: ServerConfig) -> tuple[KeyDigests, ServerConfig]:
    """The digests of the keys in `config`, and `config` without the keys. Raises SettingsError."""
    user = _keys(config.api_key, config.api_key_file, "--api-key-file")
    admin = _keys(config.admin_api_key, config.admin_api_key_file, "--admin-api-key-file")
    digests = KeyDigests(
        user=tuple(key for key, _ in user),
        admin=tuple(key for key, _ in admin),
        names={key: name for key, name in (*user, *admin) if name},
    )
    return digests, replace(config, api_key="", admin_api_key="")


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _keys(key: str, file: str, option: str) -> list[tuple[bytes, str]]:
    """The digest and the name of each key; an empty name if it has none."""
    keys = [(digest(key), "")] if key else []
    if file:
        keys += [_named(line, file, option) for line in _read(Path(file), option)]
    return keys


def _named(line: str, file: str, option: str) -> tuple[bytes, str]:
    """The digest and name in a line of a file: `KEY`, or `@NAME KEY`."""
    found = NAMED.fullmatch(line)
    if found is None:
        return digest(line), ""
    name, key = found.groups()
    if not NAME.fullmatch(name):
        allowed = "1 to 64 letters, digits and . _ - are allowed"
        raise SettingsError(f"{option} is {file}, which names a key {name[:64]!r}; {allowed}")
    return digest(key), name


def _read(path: Path, option: str) -> list[str]:
    """The lines with keys of a file. Raises SettingsError, also for a file without keys: the server
    would be open to all."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except OSError as exc:
        raise SettingsError(f"{option} is {path}, which cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(f"{option} is {path}, which is not text in UTF-8") from exc
    texts = [COMMENT.sub("", line).strip() for line in lines]
    keys = [text for text in texts if text]
    if not keys:
        raise SettingsError(f"{option} is {path}, in which there is no key")
    return keys


def share_sessions(config: EngineConfig, digests: KeyDigests) -> EngineConfig:
    """Set the default of sessions per key, unless the user has set it: with several keys, one key
    gets a quarter of all sessions."""
    if config.max_sessions_per_key or digests.num_owners < 2:
        return config
    return replace(config, max_sessions_per_key=max(config.max_sessions // 4, 1))
