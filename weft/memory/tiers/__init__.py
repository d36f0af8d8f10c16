"""The scheduler's view of KV outside of the pool: a protocol, and an implementation that stores
nothing."""
