"""Handoff between the steps of the engine: KV that is lent to another server, or taken from one."""
