"""What was saved, and what was wasted: cached prompt tokens by tenant, and tokens that nobody got.

The time that a cached token saves is what a computed one has taken in the mean, from admission to
first token, over all completions so far. That is measured where completions end; here it is only
multiplied. However many names clients invent, no more than `MAX_TENANTS` stand on the page.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

MAX_TENANTS = 100  # with numbers of their own; the rest share the label "other"
NO_TENANT = "(none)"


class Savings:
    """Grows when a completion has ended whose prompt was partly cached."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._tokens = Counter(
            prefix + "cache_saved_tokens",
            "Prompt tokens found in the prefix cache, of completions that got a token.",
            ["tenant"],
            registry=registry,
        )
        self._seconds = Counter(
            prefix + "cache_saved_seconds",
            "Waiting saved by that: these tokens times the mean prefill time of a computed one.",
            ["tenant"],
            registry=registry,
        )
        self._tenants: set[str] = set()

    def add(self, tenant: str, num_tokens: int, token_s: float) -> None:
        """A completion of `tenant` has ended; `num_tokens` of its prompt were cached, each of
        which saved `token_s` seconds."""
        label = self._label(tenant)
        self._tokens.labels(label).inc(num_tokens)
        self._seconds.labels(label).inc(num_tokens * token_s)

    def _label(self, tenant: str) -> str:
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return "other"
            self._tenants.add(tenant)
        return tenant or NO_TENANT
