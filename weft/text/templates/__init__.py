"""Chat templates: rendering conversations to text."""
