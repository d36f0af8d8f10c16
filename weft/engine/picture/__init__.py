"""The engine's pictures for the live page, made while somebody looks."""
