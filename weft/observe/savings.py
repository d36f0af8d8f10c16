"""Saved and wasted work: cached prompt tokens per tenant, and the waiting time that they save.

The time that a cached token saves is the time of one more computed token: the slope of a line
fitted to computed tokens and seconds from admission to first token, over all such completions. A
cache does not save the fixed time that every prompt takes. Clients may invent any number of names,
so the page has at most `MAX_TENANTS`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

MAX_TENANTS = 100  # tenants with separate numbers; the rest share the label "other"
NO_TENANT = "(none)"


class Savings:
    """Counts ended completions whose prompts were partly cached."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._tokens = Counter(
            prefix + "cache_saved_tokens",
            "Prompt tokens found in the prefix cache, of completions that got a token.",
            ["tenant"],
            registry=registry,
        )
        self._seconds = Counter(
            prefix + "cache_saved_seconds",
            "Waiting time saved by the prefix cache: these tokens times the time of one more "
            "computed token.",
            ["tenant"],
            registry=registry,
        )
        self._tenants: set[str] = set()
        # Least squares over these completions: seconds = fixed time + slope * computed tokens.
        self._num = 0
        self._sum_tokens = 0.0
        self._sum_seconds = 0.0
        self._sum_squares = 0.0
        self._sum_products = 0.0

    def add(self, tenant: str, num_cached: int, num_computed: int, seconds: float) -> None:
        """Count an ended completion of `tenant`: cached and computed tokens of its prompt, and the
        seconds from admission to first token."""
        self._num += 1
        self._sum_tokens += num_computed
        self._sum_seconds += seconds
        self._sum_squares += num_computed * num_computed
        self._sum_products += num_computed * seconds
        token_s = self._sum_seconds / max(self._sum_tokens, 1.0)
        spread = self._num * self._sum_squares - self._sum_tokens**2
        # While all prompts have equal lengths, only the mean is known.
        if spread > 0:
            slope = self._num * self._sum_products - self._sum_tokens * self._sum_seconds
            token_s = min(max(slope / spread, 0.0), token_s)
        label = self._label(tenant)
        self._tokens.labels(label).inc(num_cached)
        self._seconds.labels(label).inc(num_cached * token_s)

    def _label(self, tenant: str) -> str:
        if not tenant:
            return NO_TENANT
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return "other"
            self._tenants.add(tenant)
        return tenant
