"""Several engines with the face of one. A server with one engine imports nothing of this."""
