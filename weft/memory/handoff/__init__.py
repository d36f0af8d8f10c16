"""The scheduler's view of KV that another server computes or takes: a protocol, and an
implementation without another server."""
