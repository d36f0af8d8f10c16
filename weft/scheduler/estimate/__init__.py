"""Estimates of the time that a request will wait."""
