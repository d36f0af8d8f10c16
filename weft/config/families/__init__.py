"""What the `config.json` of each family means: one module per maker, `table.py` puts them
together."""
