"""The scheduler of a model with layers that keep a state. A model without such layers enters
nothing of it."""
