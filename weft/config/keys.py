"""The keys of a server, read once from options, files or the environment, and kept only as their SHA-256."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from weft.config.options import SettingsError
from weft.config.server import ServerConfig


@dataclass(frozen=True)
class KeyDigests:
    """SHA-256 of each key that is accepted."""

    user: tuple[bytes, ...] = ()
    admin: tuple[bytes, ...] = ()


def read_keys(config: ServerConfig) -> tuple[KeyDigests, ServerConfig]:
    """The keys that `config` names, and `config` without them. Raises SettingsError."""
    digests = KeyDigests(
        user=_digests(config.api_key, config.api_key_file, "--api-key-file"),
        admin=_digests(config.admin_api_key, config.admin_api_key_file, "--admin-api-key-file"),
    )
    return digests, replace(config, api_key="", admin_api_key="")


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _digests(key: str, file: str, option: str) -> tuple[bytes, ...]:
    keys = [key] if key else []
    if file:
        keys += _read(Path(file), option)
    return tuple(digest(one) for one in keys)


def _read(path: Path, option: str) -> list[str]:
    """The keys of a file. One without any is a mistake: the server would be open to all."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as exc:
        raise SettingsError(f"{option} is {path}, which cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(f"{option} is {path}, which is no text in UTF-8") from exc
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise SettingsError(f"{option} is {path}, in which there is no key")
    return keys
