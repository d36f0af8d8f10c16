"""A second policy that decides on the same inputs, without effect: `--shadow-policy`."""
