"""The live page: its files, and the stream of pictures of the engine that it shows."""
