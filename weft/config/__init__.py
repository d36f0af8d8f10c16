"""Frozen settings. No module here imports another package of weft; an option can name the function
that lists its choices."""
