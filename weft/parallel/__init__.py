"""Processes that work together."""
