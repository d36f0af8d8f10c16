"""Raises the limit of open files to what the connections need, and lowers the limit of connections
if the system allows fewer files. A server does not start with fewer than `LEAST_CONNECTIONS`.
"""

from __future__ import annotations

import resource
from dataclasses import replace

from weft.config.limits import Limits
from weft.config.options import SettingsError

# Sockets between the processes, logs, libraries, files that a request opens briefly: twice the
# observed number.
OWN_FILES = 96
SPARE = 64  # connections beyond the limit that get an answer (a refusal)
LEAST_CONNECTIONS = 16


def fit(limits: Limits) -> Limits:
    """Raise the limit of open files, and return `limits` with as many connections as it allows.

    So a connection beyond the limit is refused in order, and accepting one never fails for lack of
    files. Raises SettingsError if fewer than `LEAST_CONNECTIONS` connections are possible.
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
    """Number of open files that a server with `connections` connections needs."""
    return connections * 5 // 4 + SPARE + OWN_FILES
