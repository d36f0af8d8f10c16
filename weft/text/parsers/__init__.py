"""Tool calls and reasoning in a model's text, found while it is written (docs/guides/tools.md)."""
