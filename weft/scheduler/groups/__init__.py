"""The groups of layers with memory of their own (`protocol.py`), a file each. A model
whose layers all share one pool uses none of them."""
