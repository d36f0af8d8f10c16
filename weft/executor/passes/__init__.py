"""Passes around the computation of steps, one file each. A runner has only those that it needs."""
