"""Decides which requests run in each step. Pure: no I/O, no clock, no thread, no torch, no unseeded
random number.

Reading order: see "The core, in reading order" in docs/architecture.md.
"""
