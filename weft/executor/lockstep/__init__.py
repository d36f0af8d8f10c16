"""Engines that have the experts of one model between them, and take their steps together."""
