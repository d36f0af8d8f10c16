"""Statistics of the experts that the tokens of a model get."""
