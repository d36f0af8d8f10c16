"""Frozen settings. Nothing here imports anything else of weft; an option may name the function that
lists its choices."""
