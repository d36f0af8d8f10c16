"""What was saved, and what was wasted: cached prompt tokens by tenant, and tokens that nobody got.

The time that a cached token saves is what one more computed token takes: the slope of a line
through the tokens computed and the seconds from admission to first token of all such completions.
What every prompt takes, however short, a cache does not save. However many names clients invent,
no more than `MAX_TENANTS` stand on the page.
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
            "Waiting saved by that: these tokens times what one more computed token takes.",
            ["tenant"],
            registry=registry,
        )
        self._tenants: set[str] = set()
        # Least squares over these completions: seconds = what each takes + slope * tokens computed.
        self._num = 0
        self._sum_tokens = 0.0
        self._sum_seconds = 0.0
        self._sum_squares = 0.0
        self._sum_products = 0.0

    def add(self, tenant: str, num_cached: int, num_computed: int, seconds: float) -> None:
        """A completion of `tenant` has ended. Of its prompt, so many tokens were cached, and so
        many were computed, in so many seconds."""
        self._num += 1
        self._sum_tokens += num_computed
        self._sum_seconds += seconds
        self._sum_squares += num_computed * num_computed
        self._sum_products += num_computed * seconds
        token_s = self._sum_seconds / max(self._sum_tokens, 1.0)
        spread = self._num * self._sum_squares - self._sum_tokens**2
        # While all prompts were equally long, the mean is all that is known.
        if spread > 0:
            slope = self._num * self._sum_products - self._sum_tokens * self._sum_seconds
            token_s = min(max(slope / spread, 0.0), token_s)
        label = self._label(tenant)
        self._tokens.labels(label).inc(num_cached)
        self._seconds.labels(label).inc(num_cached * token_s)

    def _label(self, tenant: str) -> str:
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return "other"
            self._tenants.add(tenant)
        return tenant or NO_TENANT
