"""Attention backends; `executor/backend.py` lists them."""
