"""Weights of few bits that lie packed in several tensors of safetensors files."""
