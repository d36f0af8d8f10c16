"""The sources of weights, and loading weights into a model."""
