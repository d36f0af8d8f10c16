"""Several engines behind the interface of one. A server with one engine does not import it."""
