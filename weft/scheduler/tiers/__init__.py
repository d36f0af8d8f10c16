"""What the scheduler does differently where KV of cached prefixes is stored outside of the pool
(`--cache-dir`)."""
