"""What a model writes besides plain text, found while it is written: tool calls and reasoning (docs/guides/tools.md)."""
