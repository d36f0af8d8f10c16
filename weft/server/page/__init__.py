"""The live page: its files, and the stream of pictures that it shows."""
