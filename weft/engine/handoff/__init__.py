"""Handoff between the steps of the engine: what is lent to another server, and what is taken."""
