"""Control requests: they change, inspect or stop a running engine."""
