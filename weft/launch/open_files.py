"""As many open files as the system allows, and no more connections than they leave room for; below
a few of these a server does not start.
"""

from __future__ import annotations

import resource
from dataclasses import replace

from weft.config.limits import Limits
from weft.config.options import SettingsError

# Sockets between the processes, logs, libraries, what a request opens for a moment:
# twice what was seen.
OWN_FILES = 96
SPARE = 64  # connections beyond the limit that are told so
LEAST_CONNECTIONS = 16


def fit(limits: Limits) -> Limits:
    """`limits` with as many connections as there can be,
    after the process has taken what the system lets it have.

    So running out of files is refused like anything else, and never met when a connection is
    accepted. Raises SettingsError if the system leaves room for hardly any.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _files(limits.max_connections)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    connections = (soft - OWN_FILES - SPARE) * 4 // 5
    if connections < LEAST_CONNECTIONS:
        raise SettingsError(
            f"the system allows {soft} open files (ulimit -n), and a server needs at least "
            f"{_files(LEAST_CONNECTIONS)}"
        )
    return replace(limits, max_connections=connections)


def _files(connections: int) -> int:
    """Open files of a server with so many connections."""
    return connections * 5 // 4 + SPARE + OWN_FILES
