"""The scheduler of a model whose layers with sliding windows have pages of their own. A model with
one kind of layers enters nothing of it."""
