"""Transcripts of models that write down speech: their tokens, segments, words and file formats.
Pure: numbers and texts in, numbers and texts out."""
