"""Whether the Hugging Face hub can be reached, asked once and quickly: its library tries again for
many seconds, in silence, before it says that there is no network.
"""

from __future__ import annotations

import os
import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

CONNECT_TIMEOUT_S = 3.0


def why_unreachable(endpoint: str) -> str:
    """Why no connection to the hub at `endpoint` (or to the proxy before it) can be opened; "" if
    one can. Takes at most about `CONNECT_TIMEOUT_S`, also if names are not resolved."""
    parts = urlsplit(endpoint)
    proxy = getproxies().get(parts.scheme) or getproxies().get("all")
    if proxy and not proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if parts.scheme not in ("http", "https"):
            return ""
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = [f"it has not answered for {CONNECT_TIMEOUT_S:g} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
            found[0] = ""
        except TimeoutError:
            pass
        except OSError as exc:
            found[0] = exc.strerror or str(exc)

    # A thread, because looking up a name has no time limit of its own.
    thread = threading.Thread(target=connect, name="weft-hub", daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_S + 0.2)
    return found[0] and f"{host}:{port}: {found[0]}"


def is_offline() -> bool:
    """Whether the user has switched the hub off."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
