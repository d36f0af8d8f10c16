"""Strings and token ids: tokenizer, chat template, stop strings, tool calls in a model's text."""
