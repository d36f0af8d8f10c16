"""The settings and the checked model that a front is built from, in one value. It exists before
anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.config.keys import KeyDigests
from weft.config.limits import Limits
from weft.config.server import ServerConfig

if TYPE_CHECKING:  # this takes a moment to import
    from weft.assemble.prepare import Prepared


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    prepared: Prepared  # the model, and the settings of one engine
    config: ServerConfig
    limits: Limits  # connections limited to what the system allows
    digests: KeyDigests
    aliases: tuple[str, ...] = ()  # other names by which requests may name the model

    @property
    def model_name(self) -> str:
        """The name of the model in the API."""
        return self.config.served_model_name or self.prepared.model.name
