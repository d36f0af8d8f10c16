"""Steps in torch alone: the specification, on any device."""
