"""Steps that are planned before it is known how much of the previous step counts."""
