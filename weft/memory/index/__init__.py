"""Lookups over the prefix tree that are updated when it changes."""
