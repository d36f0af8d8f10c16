"""The models on this machine: which there are, what they are, and removing and copying them."""
