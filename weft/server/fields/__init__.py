"""Readers of fields that several APIs share."""
