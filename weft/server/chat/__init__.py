"""Chats as all APIs share them: their struct, templates, tools, reasoning, and parts of answers."""
