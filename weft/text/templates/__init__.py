"""Conversations into text."""
