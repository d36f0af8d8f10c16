"""Routing: chooses one of several engines for a request."""
