"""What the scheduler knows of KV that another server computes, or takes: a protocol, and a twin
without another server."""
