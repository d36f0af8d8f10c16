"""Encoders of pictures, videos and sounds. Their vectors replace the embeddings of tokens."""
