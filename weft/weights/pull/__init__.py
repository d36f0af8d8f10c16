"""Fetches models from the Hugging Face hub into its cache, where other programs find them, too."""
