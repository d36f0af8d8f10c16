"""What a server keeps beyond its end (docs/guides/state.md)."""
