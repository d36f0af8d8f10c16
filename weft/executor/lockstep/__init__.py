"""Engines that share the experts of one model, and take their steps together."""
