"""The decision journal: a record of all inputs of the core, and a replay that makes the same
decisions from it."""
