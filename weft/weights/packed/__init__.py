"""Weights in few bits that safetensors files store packed, in several tensors per weight."""
