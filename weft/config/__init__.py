"""Frozen settings. Nothing here imports anything else of weft."""
