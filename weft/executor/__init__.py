"""Runs one plan on one device. `plan` is what the scheduler sees of it, and the only module here
without torch."""
