"""Adapters (LoRA): reading them, and their places while a model runs."""
