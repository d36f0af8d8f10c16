"""Several tokens of a request in one step: tokens that are guessed, computed together and compared
with what the model says."""
