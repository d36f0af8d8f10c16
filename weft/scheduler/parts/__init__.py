"""The choice of the parts that a scheduler is made of, by its settings."""
