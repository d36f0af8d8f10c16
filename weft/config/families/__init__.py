"""Readers of the `config.json` of each family: a module per maker, family or kind;
`table.py` combines them."""
