"""As many open files as the system allows, and no more connections than they leave room for."""

from __future__ import annotations

import resource
from dataclasses import replace

from weft.config.limits import Limits

OWN_FILES = 256  # sockets between the processes, weights, logs, libraries


def fit(limits: Limits) -> Limits:
    """`limits` with as many connections as there can be, after the process has taken what the system lets it have.

    So running out of files is refused like anything else, and never met when a connection is accepted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections * 5 // 4 + 64 + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    return replace(limits, max_connections=max((soft - OWN_FILES - 64) * 4 // 5, 1))
