"""The scheduler of a model with layers that keep a state. Other models do not use this package."""
