"""Kinds of adapters, one file each (`kind.py` has their protocol)."""
