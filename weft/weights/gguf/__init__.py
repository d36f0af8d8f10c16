"""GGUF files: their header, the meaning of their blocks, and weft's names of their tensors."""
