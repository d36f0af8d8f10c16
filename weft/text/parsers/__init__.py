"""Finds tool calls and reasoning in a model's text while it is generated (docs/guides/tools.md)."""
