"""Adapters (LoRA): reading them, and where they stand while a model runs."""
