"""Waiting requests that are kept in order, so that a step pays for those that have changed."""
