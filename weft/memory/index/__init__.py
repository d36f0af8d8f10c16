"""Lookups over the prefix tree that stay true while it changes."""
