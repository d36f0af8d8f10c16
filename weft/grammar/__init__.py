"""Grammars that constrain outputs: they are compiled once, and followed token by token.

This package knows no request and no model.
"""
