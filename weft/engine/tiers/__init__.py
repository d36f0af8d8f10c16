"""The store of KV outside of the pool, between the engine's steps."""
