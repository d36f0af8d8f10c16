"""Waiting requests in an order that is kept, so that a step sorts only those that have changed."""
