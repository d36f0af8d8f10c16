"""Communication between processes that work together."""
