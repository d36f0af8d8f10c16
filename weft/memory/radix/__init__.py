"""The prefix cache: a radix tree (`tree`), the order in which leaves are evicted (`eviction`), and
the cache of both, which counts whose pages are protected (`cache`)."""
