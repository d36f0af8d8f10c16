"""A second policy, which decides on the same inputs without effect: `--shadow-policy`."""
