"""The scheduler of a model whose layers with sliding windows have pages of their own. Other models
do not use this package."""
