"""Layers with memory of their own: the seam (`protocol.py`), and the kinds of such layers."""
