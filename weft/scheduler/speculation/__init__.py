"""Speculation: several tokens of a request in one step. They are guessed, computed together and
compared with the tokens that the model samples."""
