"""GGUF files: what stands in them, what their blocks mean, and under which names weft knows it."""
