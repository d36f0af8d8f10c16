"""Encoders of pictures, videos and sounds, whose vectors take the place of tokens."""
