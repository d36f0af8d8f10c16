"""Readers of the `config.json` of each family: one module per maker; `table.py` combines them."""
