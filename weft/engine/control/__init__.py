"""Control requests: what changes, asks or stops a running engine."""
