"""Steps that are planned before it is known what counts of the one before."""
