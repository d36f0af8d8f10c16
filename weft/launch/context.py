"""What a server is launched with, in one value:
what is checked and open before anything is loaded.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.config.keys import KeyDigests
from weft.config.limits import Limits
from weft.config.server import ServerConfig

if TYPE_CHECKING:  # these take a moment to import
    from weft.assemble.prepare import Prepared
    from weft.launch.console import Console


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    prepared: Prepared  # the model, and the engine's settings
    config: ServerConfig
    limits: Limits  # with as many connections as the system allows
    digests: KeyDigests
    listener: socket.socket
    console: Console

    @property
    def model_name(self) -> str:
        """The name of the model in the API."""
        return self.config.served_model_name or self.prepared.model.name

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port
