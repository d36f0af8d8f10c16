"""What the scheduler knows of KV that is not in the pool: a protocol, and a twin that stores
nothing."""
