"""The parts of models. Each part yields its weights: the name in a checkpoint, and the destination
of the values."""
