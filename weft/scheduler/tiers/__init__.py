"""The parts of the scheduler for KV of cached prefixes that is stored outside of the pool
(`--cache-dir`)."""
