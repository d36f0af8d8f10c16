"""Which experts the tokens of a model get."""
