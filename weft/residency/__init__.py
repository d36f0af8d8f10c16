"""Decides which models of a server are in memory; pure, see README.md."""
