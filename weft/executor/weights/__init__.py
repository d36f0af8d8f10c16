"""The weights of the running model: new ones, their checks, and their pieces."""
