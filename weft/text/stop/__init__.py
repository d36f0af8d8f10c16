"""Stop strings and stop patterns: the end of a completion in its text."""
