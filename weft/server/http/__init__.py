"""The middleware of every HTTP request, and the protocol below it."""
