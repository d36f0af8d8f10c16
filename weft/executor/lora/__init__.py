"""Adapters (LoRA): reading them, and their slots while a model runs."""
