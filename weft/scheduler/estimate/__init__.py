"""How long a request will wait, before it has waited."""
